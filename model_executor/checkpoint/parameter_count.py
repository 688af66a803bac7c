"""Counts the parameters of a checkpoint's part. Checkpoints quantised with other methods than torchao's do not get
here: `describe` opens checkpoints for the CPU, where they are rejected."""

from __future__ import annotations

from pathlib import Path

from model_executor.checkpoint.file_parameters import count_file
from model_executor.checkpoint.weights import usual_variant, weight_files


def count_parameters(folder: Path) -> int:
    """Parameters in a part's folder, counting one variant. Raises ConfigError for a file that cannot be read."""
    return sum(map(count_file, weight_files(folder, usual_variant(folder, ""))))
