"""Finds and checks the weight files of one part of a checkpoint: safetensors in one file or in shards, possibly in
several variants.

A variant is the same weights in another dtype, or others for the same part, as `non_ema`. Its name is part of the file
names, as in diffusers and transformers: `fp16` in `model.fp16.safetensors` and
`model.fp16-00001-of-00002.safetensors`. "" is the unnamed variant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

_NAME = re.compile(r"[^.]+?(?:\.(?P<variant>[^.-]+))?(?:-\d+-of-\d+)?\.safetensors")

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that torch.save or pickle wrote."""


def variants(folder: Path) -> set[str]:
    """The variants that the folder has weight files of."""
    return {variant_of(path) for path in folder.glob("*.safetensors")}


def variant_of(path: Path) -> str:
    """The variant of a weight file."""
    match = _NAME.fullmatch(path.name)
    return (match["variant"] or "") if match else ""


def usual_variant(folder: Path, wanted: str) -> str:
    """`wanted` if the folder has it, else the unnamed variant, else the first by name; "" if there is none."""
    found = variants(folder)
    return wanted if wanted in found else min(found, default="")  # the empty name sorts first


def choose_variant(folder: Path, wanted: str) -> str:
    """As `usual_variant`, but raises ValueError if there are no weights, or if it would have to guess: several
    named variants, no unnamed one, and none of them asked for.
    """
    found = variants(folder)
    if not found:
        raise ValueError("it has no safetensors weights; is the checkpoint complete?")
    if "" not in found and wanted not in found and len(found) > 1:
        raise ValueError(f"its weights come as {' and '.join(sorted(found))}: choose one with --variant")
    return usual_variant(folder, wanted)


def weight_files(folder: Path, variant: str) -> list[Path]:
    """The weight files of a variant, sorted."""
    return sorted(path for path in folder.glob("*.safetensors") if variant_of(path) == variant)


def read_tensors(files: Iterable[Path], names: Collection[str]) -> dict[str, Tensor]:
    """The weights of these names, as they are stored. Raises ValueError if one is missing."""
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in names}  # noqa: SIM118
    if missing := sorted(set(names) - found.keys()):
        raise ValueError(f"the weights lack {missing[0]}")
    return found


def check_pickles(folder: Path) -> None:
    """Raises ValueError if there are only pickled weights, or if a safetensors index names other files, which
    diffusers and transformers would unpickle.
    """
    pickles = sorted(name for name in _indexed(folder) if not name.endswith(".safetensors"))
    if not pickles and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"only safetensors weights are read, as unpickling {pickles[0]} could run code; convert it with "
            "save_pretrained(..., safe_serialization=True) where you trust it"
        )


def check_shards(folder: Path, variant: str) -> None:
    """Raises ValueError if an index names shards of the variant that are missing."""
    named = (name for name in _indexed(folder) if variant_of(Path(name)) == variant)
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise ValueError(f"{missing[0]} is missing; is the checkpoint complete?")


def check_whole(folder: Path, variant: str) -> None:
    """Raises ValueError if the header of a file of the variant says that it is damaged or truncated."""
    for file in weight_files(folder, variant):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file.name} is damaged or cut short ({error}); fetch it again") from error


def _indexed(folder: Path) -> set[str]:
    """The files that the folder's shard indexes name."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors.index*.json"):
        index = json.loads(path.read_text("utf-8"))
        if not isinstance(index, dict) or not isinstance(shards := index.get("weight_map", {}), dict):
            raise ValueError(f"{path.name} is no index of shards")
        names.update(map(str, shards.values()))
    return names
