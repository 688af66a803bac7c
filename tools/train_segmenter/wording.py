"""Pretrains the text encoder for some seconds: tell the thing and the colour that a prompt names, with linear heads
that are discarded.

Otherwise the encoder would first have to learn the nouns from the decoder's gradients.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPSegForImageSegmentation, PreTrainedTokenizerBase

from tools.train_embedded.garments import COLOURS
from tools.train_segmenter.prompts import any_look, determined, phrase, stranger
from tools.train_segmenter.things import THINGS

STEPS, BATCH = 200, 96
STRANGE = 0.15  # share of the prompts that name no thing


def teach_wording(model: CLIPSegForImageSegmentation, tokenizer: PreTrainedTokenizerBase, steps: int = STEPS) -> float:
    """Train the text encoder in place; returns the share of the last batch's prompts that are read without error."""
    rng, width = random.Random(0), model.config.projection_dim
    heads = nn.ModuleList([nn.Linear(width, len(THINGS) + 1), nn.Linear(width, len(COLOURS) + 1)])
    text = (model.clip.text_model, model.clip.text_projection, heads)
    parameters = [parameter for module in text for parameter in module.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    right = 0.0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20) * (1 - step / steps)
        texts, labels = _lesson(rng)
        text_ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
        meanings = model.clip.get_text_features(text_ids).pooler_output
        answers = [head(meanings) for head in heads]
        loss = sum((F.cross_entropy(a, labels[:, i]) for i, a in enumerate(answers)), torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        correct = torch.stack([answer.argmax(-1) == labels[:, i] for i, answer in enumerate(answers)])
        right = float(correct.all(0).float().mean())
    return right


def _lesson(rng: random.Random) -> tuple[list[str], torch.Tensor]:
    """Prompts, and labels [prompts, 2]: the thing's number and the garment's colour's, from 1 on; 0: none is named."""
    texts, labels = list[str](), []
    for _ in range(BATCH):
        if rng.random() < STRANGE:
            texts.append(determined(rng, [stranger(rng)]))
            labels.append((0, 0))
            continue
        thing = rng.choice(THINGS)
        look, say_colour = any_look(rng, thing), float(rng.random() < 0.5)
        texts.append(phrase(rng, thing, look, say_colour))
        labels.append((THINGS.index(thing) + 1, COLOURS.index(look.colour) + 1 if look and say_colour else 0))
    return texts, torch.tensor(labels)
