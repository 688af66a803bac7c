"""Tokenizers with missing or damaged files are refused in one line; transformers would load them without any words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

from core.config import ModelConfig
from core.errors import ConfigError
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.tokenizer_check import check_files, check_tokenizer
from model_executor.models.base import Family
from model_executor.models.registry import make_family
from tools.random_checkpoints import make_flux, make_qwen, make_qwen_edit, make_sd3
from tools.random_unet_checkpoints import make_sd, make_sdxl

MAKERS: dict[str, Callable[[Path], Path]] = {
    "flux": make_flux,
    "sd3": make_sd3,
    "qwen-image": make_qwen,
    "qwen-image-edit": make_qwen_edit,
    "sd": make_sd,
    "sdxl": make_sdxl,
}
TOKENIZERS = [
    ("flux", "tokenizer"),
    ("flux", "tokenizer_2"),
    ("sd3", "tokenizer"),
    ("sd3", "tokenizer_2"),
    ("sd3", "tokenizer_3"),
    ("qwen-image", "tokenizer"),
    ("qwen-image-edit", "tokenizer"),
    ("sd", "tokenizer"),
    ("sdxl", "tokenizer"),
    ("sdxl", "tokenizer_2"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make(folder / name) for name, make in MAKERS.items()}


@pytest.fixture
def copy(checkpoints: Mapping[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint of the given family, to damage."""
    return lambda name: Path(shutil.copytree(checkpoints[name], tmp_path / "copy"))


def open_family(path: Path) -> Family:
    return make_family(ModelCheckpoint.open(ModelConfig(model=str(path), device="cpu", dtype="float32")))


def assert_refused(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_family(path)
    assert "\n" not in str(caught.value)


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_every_tokenizer_of_every_family_is_checked(checkpoints: Mapping[str, Path]) -> None:
    found = {(name, folder.name) for name, path in checkpoints.items() for folder in path.glob("tokenizer*")}
    assert found == set(TOKENIZERS)


@pytest.mark.parametrize(("name", "part"), TOKENIZERS)
def test_a_vocabulary_that_is_missing(copy: Callable[[str], Path], name: str, part: str) -> None:
    """Only its file, and all files in the folder."""
    path = copy(name)
    (path / part / "tokenizer.json").unlink()
    why = rf"cannot load {part} of .*: it has no .*\(or tokenizer\.json\); is the checkpoint complete\?"
    assert_refused(path, why)
    (path / part / "tokenizer_config.json").unlink()
    assert_refused(path, why)


@pytest.mark.parametrize(("name", "part"), TOKENIZERS)
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"added_tokens": []}', '{"added_tokens": [], "model": {}}', "\xff"]
)
def test_a_damaged_vocabulary(copy: Callable[[str], Path], name: str, part: str, content: str) -> None:
    path = copy(name)
    (path / part / "tokenizer.json").write_text(content, "latin-1")
    assert_refused(path, rf"cannot load {part} of .*fetch (it|them) again")


@pytest.mark.parametrize("name", ["sd", "qwen-image"])
def test_a_vocabulary_without_words(copy: Callable[[str], Path], name: str) -> None:
    path = copy(name)
    change(path / "tokenizer/tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])
    assert_refused(
        path, "cannot load tokenizer of .*: it (turns all prompts into the same tokens|cannot read a prompt)"
    )


def make_words(folder: Path, *words: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these words alone."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", *words])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    special = [{"id": number, "content": word, "special": True} for number, word in enumerate(["<unk>", "<pad>"])]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    content["added_tokens"] = [each | flags for each in special]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>", pad_token="<pad>", model_max_length=8
    )


@pytest.mark.parametrize("words", [("cat", "dog"), ("a", "cat"), ("Hut",), ("\u5e3d",)])
def test_a_small_vocabulary_is_taken(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Though it has none of the letters, or reads all but one word as unknown."""
    check_tokenizer(make_words(tmp_path, *words), {})


def test_a_vocabulary_of_special_tokens_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turns all prompts into the same tokens"):
        check_tokenizer(make_words(tmp_path), {})


@pytest.mark.parametrize(("name", "part"), [each for each in TOKENIZERS if each[1] != "tokenizer_3"])
def test_an_encoder_that_knows_fewer_tokens(copy: Callable[[str], Path], name: str, part: str) -> None:
    """A prompt with an unknown token would fail the step, and on a GPU end the worker."""
    path = copy(name)
    file = path / part.replace("tokenizer", "text_encoder") / "config.json"
    config = json.loads(file.read_text())
    (config.get("text_config") or config)["vocab_size"] = 20
    file.write_text(json.dumps(config))
    assert_refused(path, "it makes tokens up to number .* has a vocab_size of 20; are both of one checkpoint")


@pytest.mark.parametrize("name", ["flux", "sd3", "sd", "sdxl"])
def test_a_length_that_the_encoder_cannot_read(copy: Callable[[str], Path], name: str) -> None:
    """Without its configuration, a CLIP tokenizer has no maximum length."""
    path = copy(name)
    change(path / "tokenizer/tokenizer_config.json", model_max_length=13)
    assert_refused(path, "names no model_max_length of at most 12 tokens")
    (path / "tokenizer/tokenizer_config.json").unlink()
    assert_refused(path, "names no model_max_length of at most 12 tokens")


@pytest.mark.parametrize(("name", "part"), TOKENIZERS)
def test_a_configuration_without_a_token_to_fill_up_with(copy: Callable[[str], Path], name: str, part: str) -> None:
    path = copy(name)
    change(path / part / "tokenizer_config.json", pad_token=None)
    assert_refused(path, f"cannot load {part} of .*: it has no pad_token, with which diffusers' pipelines fill up")
    change(path / part / "tokenizer_config.json", pad_token="a", model_max_length=-1)
    assert_refused(path, f"cannot load {part} of .*: .* model_max_length below 1")


def test_a_vocabulary_in_several_files_needs_all_of_them(tmp_path: Path) -> None:
    """As in Stable Diffusion's checkpoints."""
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"it has no merges\.txt \(or tokenizer\.json\)"):
        check_files(tmp_path, CLIPTokenizer)
    (tmp_path / "merges.txt").write_text("")
    check_files(tmp_path, CLIPTokenizer)


def test_a_tokenizer_of_vocabulary_and_merges_is_read(copy: Callable[[str], Path]) -> None:
    path = copy("sd")
    prompt = "a red hat"
    before = open_family(path)._tokenizers[0](prompt).input_ids  # type: ignore[attr-defined]
    model = json.loads((path / "tokenizer/tokenizer.json").read_text())["model"]
    (path / "tokenizer/vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "tokenizer/merges.txt").write_text("#version: 0.2\n")
    (path / "tokenizer/tokenizer.json").unlink()
    assert open_family(path)._tokenizers[0](prompt).input_ids == before  # type: ignore[attr-defined]
