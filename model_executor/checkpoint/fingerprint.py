"""Computes the fingerprint of a checkpoint: a hash over everything but the input that its cached pages depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from model_executor.checkpoint.file_hashes import FileHashes
from model_executor.checkpoint.hub import INDEX
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.weights import usual_variant, variant_of

_PATTERNS = ("*/*.json", "*/*.txt", "*/*.model", "*/*.jinja", "*/*.safetensors")
"""All files that parts are loaded from."""

_CONDITIONING = {"force_zeros_for_empty_prompt": True}
"""Entries of the index that change how templates are primed -> what a family takes where they are missing. At that
value they do not count, as where they are missing."""


def fingerprint(checkpoint: ModelCheckpoint, cache_folder: Path) -> str:
    """Hex digest of the checkpoint's weights, configurations and tokenizers, the parts in its index and how it has
    templates primed, the compute dtype and the quantisation.

    Does not depend on where the files are. Raises OSError for a file that cannot be read; a damaged cache of hashes is
    computed again.
    """
    hashes = FileHashes(cache_folder)
    parts = [(str(path.relative_to(checkpoint.path)), hashes.sha256(path)) for path in _files(checkpoint)]
    parts.append((INDEX, _of_index(checkpoint)))
    hashes.save()
    computed = [str(checkpoint.dtype), *([checkpoint.quantization] if checkpoint.quantization != "none" else [])]
    return hashlib.sha256(repr([*computed, parts]).encode()).hexdigest()


def _of_index(checkpoint: ModelCheckpoint) -> str:
    """Hex sha256 of the entries of the index that count. A part that it omits is not used, even if its files exist."""
    counts = {
        name: value
        for name, value in checkpoint.index.items()
        if isinstance(value, list) or _CONDITIONING.get(name, value) != value
    }
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()


def _files(checkpoint: ModelCheckpoint) -> Iterator[Path]:
    """The files to hash, in order; weights only of the variant that is loaded."""
    for path in sorted(path for pattern in _PATTERNS for path in checkpoint.path.glob(pattern)):
        if path.suffix != ".safetensors" or variant_of(path) == usual_variant(path.parent, checkpoint.variant):
            yield path
