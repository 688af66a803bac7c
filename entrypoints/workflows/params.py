"""What models declare in `setup_io`: InputParam and OutputParam, named as in diffusers' modular pipelines
(modular_pipeline_utils.py)."""

from __future__ import annotations

from dataclasses import dataclass

from core.graph.form import Form


@dataclass(frozen=True, slots=True)
class InputParam:
    """An input of a model."""

    name: str
    form: Form
    required: bool = True  # else an invocation may leave it out
    deferred: bool = False  # taken late in the model's work: it may start before the value is made


@dataclass(frozen=True, slots=True)
class OutputParam:
    """An output of a model."""

    name: str
    form: Form
