"""Builds the two tokenizers from the captions' words: CLIP's byte-level BPE, and T5's unigram, which spells others."""

import json
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5TokenizerFast

from tools.train_embedded.captions import vocabulary
from tools.train_embedded.layout import TEXT_TOKENS

START, END = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizers:
    clip: PreTrainedTokenizerBase
    t5: PreTrainedTokenizerBase

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """CLIP and T5 ids, each [captions, TEXT_TOKENS], padded as FluxFillPipeline pads them."""
        clip = self.clip(captions, padding="max_length", max_length=TEXT_TOKENS, truncation=True)["input_ids"]
        t5 = self.t5(captions, padding="max_length", max_length=TEXT_TOKENS, truncation=True)["input_ids"]
        return torch.tensor(clip), torch.tensor(t5)


def tokenizers_in(folder: Path) -> Tokenizers:
    """The tokenizers saved in `folder`; built and saved by the first call.

    The BPE trainer breaks ties in another order in every process, so a rebuilt tokenizer has other ids.
    """
    if not (folder / "t5").exists():
        words = vocabulary()
        clip_tokenizer(words).save_pretrained(folder / "clip")
        t5_tokenizer(words).save_pretrained(folder / "t5")
    kept = Tokenizers(CLIPTokenizer.from_pretrained(folder / "clip"), T5TokenizerFast.from_pretrained(folder / "t5"))
    for tokenizer in (kept.clip, kept.t5):
        for key in ("is_local", "local_files_only"):  # set by this load; not part of the checkpoint
            tokenizer.init_kwargs.pop(key, None)
    return kept


def clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """A lower-casing byte-level BPE. All bytes are in the vocabulary, so that it accepts any text."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=END))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2048, min_frequency=1, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator(words, trainer)
    model = json.loads(bpe.to_str())["model"]
    vocabulary_ids: dict[str, int] = model["vocab"]
    for token in [f"{character}</w>" for character in alphabet] + [START, END]:
        vocabulary_ids.setdefault(token, len(vocabulary_ids))
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return CLIPTokenizer(vocab=vocabulary_ids, merges=merges, model_max_length=TEXT_TOKENS)


def t5_tokenizer(words: list[str], cased: tuple[str, ...] = ()) -> T5TokenizerFast:
    """A unigram tokenizer. Scores are log probabilities that favour a word over letters; unknown characters are <unk>.

    cased: further spellings of the words, whose ids follow all others.
    """
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -3.0) for word in words]
    pieces += [(character, -8.0) for character in string.ascii_letters + string.digits + ".,-'!?"]
    pieces += [(f"▁{spelling}", -3.0) for spelling in cased]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=TEXT_TOKENS)
