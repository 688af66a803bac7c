"""Names the components of the served models by content, so that models share those that are equal.

Two parts can only be equal if their class, configuration, form and sizes of files are. Of such parts, and of them
alone, the weights are hashed (see `FileHashes`): half a second per gigabyte at the first start, nothing later. All
others are told apart by where their files are and when these were written, so a server with one model hashes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core.errors import ConfigError
from core.handles import ModelKey
from model_executor.checkpoint.file_hashes import FileHashes
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.quantization import QUANTIZED
from model_executor.checkpoint.weights import usual_variant, weight_files
from model_executor.models.base import Family

T = TypeVar("T")

KEY_DIGITS = 16
"""Hex digits of a key's content."""

NOT_CONTENT = ("architectures", "dtype", "torch_dtype", "transformers_version")
"""Entries of a config.json that say how it was made, beside those that begin with an underscore. The class comes from
model_index.json, and the dtype from the server's flags."""

TEXT_FILES = ("tokenizer", "processor")
"""How the names of the parts begin that turn prompts and pictures into the text encoders' inputs."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A served model without its weights."""

    checkpoint: ModelCheckpoint
    family: Family


@dataclass(frozen=True, slots=True)
class Part:
    """A component as it is named by what consists of it."""

    owner: str  # name of a model, or of the model that it finds masks for
    kind: str
    name: str  # that its owner gives it
    checkpoint: ModelCheckpoint
    part: str  # of the checkpoint
    recipe: str = ""  # what else a loaded part depends on, see `Family.recipe`


def parts_of_models(opened: Mapping[str, Opened]) -> list[Part]:
    """The parts of all models."""
    return [
        Part(name, kind, part, each.checkpoint, part, each.family.recipe(part))
        for name, each in opened.items()
        for kind, group in each.family.components.items()
        for part in group
    ]


def component_keys(wanted: Iterable[Part], cache_folder: Path) -> dict[str, dict[str, ModelKey]]:
    """Owner -> name of a part -> the key of the component; parts with equal keys are equal. Raises ConfigError for
    weights that cannot be read."""
    parts = [_Files(each, *_outline(each)) for each in wanted]
    keys: dict[str, dict[str, ModelKey]] = {each.part.owner: {} for each in parts}
    hashes = FileHashes(cache_folder)
    for alike in _grouped((part.outline, part) for part in parts).values():
        are_hashed = len({_places(part.files) for part in alike}) > 1
        for part in alike:
            files = _contents(part.files, hashes) if are_hashed else _places(part.files)
            name = part.part
            keys[name.owner][name.name] = ModelKey(_digest(part.outline, files)[:KEY_DIGITS], name.kind)
    hashes.save()
    return keys


def prompt_twins(opened: Mapping[str, Opened], keys: Mapping[str, Mapping[str, ModelKey]]) -> dict[str, str]:
    """Model -> the first model that embeds prompts alike, for models of which another one does. keys: of the models'
    parts."""
    alike = _grouped((_text_key(each, keys[name].values()), name) for name, each in opened.items())
    candidates = [name for names in alike.values() if len(names) > 1 for name in names]
    same = _grouped(
        ((_text_key(opened[name], keys[name].values()), _text_files(opened[name].checkpoint)), name)
        for name in candidates
    )
    return {name: names[0] for names in same.values() for name in names[1:]}


@dataclass(frozen=True, slots=True)
class _Files:
    part: Part
    outline: str  # digest of all but the content of its weights
    files: tuple[Path, ...]  # its weights


def _outline(wanted: Part) -> tuple[str, tuple[Path, ...]]:
    """(digest of all that a loaded part depends on but the content of its weights, their files)."""
    checkpoint, part = wanted.checkpoint, wanted.part
    folder = checkpoint.folder(part)
    files = tuple(weight_files(folder, usual_variant(folder, checkpoint.variant)))
    places = checkpoint.device.type, checkpoint.home_of(part).type
    form = [str(checkpoint.dtype), *places, checkpoint.quantization if part in QUANTIZED else "none"]
    configuration = _configuration(folder / "config.json")
    facts = [wanted.kind, checkpoint.index.get(part), configuration, form, wanted.recipe]
    return _digest(*facts, [file.stat().st_size for file in files]), files


def _configuration(file: Path) -> dict[str, Any]:
    """The entries that a part's weights are loaded with, sorted; none if there are none, which loading will report."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_text("utf-8"))
        return {name: content[name] for name in sorted(content) if name[:1] != "_" and name not in NOT_CONTENT}
    return {}


def _places(files: Iterable[Path]) -> tuple[tuple[str, int], ...]:
    """Where files are, and when they were written in nanoseconds."""
    return tuple((str(file.resolve()), file.stat().st_mtime_ns) for file in files)


def _contents(files: Iterable[Path], hashes: FileHashes) -> tuple[str, ...]:
    try:
        return tuple(hashes.sha256(file) for file in files)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _text_key(opened: Opened, keys: Iterable[ModelKey]) -> Hashable:
    return opened.family.text_recipe, tuple(key for key in keys if key.component == "text_encoder")


def _text_files(checkpoint: ModelCheckpoint) -> str:
    """Digest of the files of tokenizers and processor."""
    return _digest(*((str(file.relative_to(checkpoint.path)), file.read_bytes()) for file in _named(checkpoint)))


def _named(checkpoint: ModelCheckpoint) -> Iterator[Path]:
    for part in sorted(part for part in checkpoint.index if part.startswith(TEXT_FILES)):
        yield from sorted(file for file in checkpoint.folder(part).glob("*") if file.is_file())


def _grouped(pairs: Iterable[tuple[Hashable, T]]) -> dict[Hashable, list[T]]:
    found: dict[Hashable, list[T]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
