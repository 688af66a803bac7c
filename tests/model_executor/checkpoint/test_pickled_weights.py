"""Pickles in a checkpoint: they are refused in one line and never loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.config import ModelConfig
from core.errors import ConfigError
from model_executor.worker.loading.resident import ResidentModels

MODULES = ("transformer", "vae", "text_encoder", "text_encoder_2")
NAMES = ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.pt", "model.pkl", "model.ckpt")


class Bomb:
    """Creates a folder at `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "unpickled"


def plant(folder: Path, mark: Path) -> None:
    for name in NAMES:
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))


def load(path: Path) -> None:
    ResidentModels.open([ModelConfig(model=str(path), served_model_name="tiny")]).load_all()


def test_the_bomb_works(mark: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.is_dir()


@pytest.mark.parametrize("part", MODULES)
def test_pickled_weights_are_refused(copy: Path, mark: Path, part: str) -> None:
    for file in (copy / part).glob("*.safetensors*"):
        file.unlink()
    plant(copy / part, mark)
    with pytest.raises(ConfigError, match=f"{part}.*only safetensors weights are read") as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("part", MODULES)
def test_an_index_that_names_a_pickle(copy: Path, mark: Path, part: str) -> None:
    """Diffusers and transformers pick the reader by the suffix of the file that an index names."""
    plant(copy / part, mark)
    for file in (copy / part).glob("*.safetensors"):
        tensors = load_file(file)
        file.unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.pt")}
        file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"unpickling model\.pt could run code"):
        load(copy)
    assert not mark.exists()


def test_pickles_beside_safetensors_are_left_alone(copy: Path, mark: Path) -> None:
    """In every folder, including the tokenizers' and the scheduler's."""
    for folder in (copy, *(path for path in copy.iterdir() if path.is_dir())):
        plant(folder, mark)
    load(copy)
    assert not mark.exists()
