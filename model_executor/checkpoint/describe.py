"""Prints, as JSON, the model families, or a description of one checkpoint and of adapters for it; reads no weights.

    python -m model_executor.checkpoint.describe [CHECKPOINT [NAME=ADAPTER...]]

`entrypoints.models`, which may not import torch, runs it as a process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from core.config import AdapterConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.logs import one_line
from core.model_card import AdapterCard, CheckpointCard, FamilyCard
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.page_schemes import DEFAULT_DTYPE, DEFAULT_KEYFRAMES
from model_executor.checkpoint.parameter_count import count_parameters
from model_executor.models.base import Family
from model_executor.models.registry import FAMILIES, make_family
from model_executor.patches.adapters import read_adapter


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1, with one line on stderr, for a checkpoint that cannot be served."""
    try:
        card = describe(argv[0], argv[1:]) if argv else families()
    except ConfigError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(card))
    return 0


def families() -> list[FamilyCard]:
    """All model families, each with the pipeline classes that it serves."""
    pipelines: dict[str, list[str]] = {}
    for pipeline, family in FAMILIES.items():
        pipelines.setdefault(family.family, []).append(pipeline)
    by_name = {family.family: family for family in FAMILIES.values()}
    return [
        FamilyCard(
            name=name,
            checkpoints=by_name[name].checkpoints,
            pipelines=tuple(found),
            summary=by_name[name].summary,
        )
        for name, found in pipelines.items()
    ]


def describe(model: str, adapters: Sequence[str] = ()) -> CheckpointCard:
    """Describe a checkpoint. model: a directory, or a hub id, which is downloaded. adapters: NAME=PATH each. Raises
    ConfigError."""
    checkpoint = ModelCheckpoint.open(ModelConfig(model=model, device="cpu", dtype="bfloat16"))
    checkpoint.check_formats()
    family = make_family(checkpoint)
    info = family.info(model)
    parts = [part for group in family.components.values() for part in group]
    return CheckpointCard(
        pipeline=checkpoint.class_name,
        scheduler=str(checkpoint.index["scheduler"][1]),
        info=info,
        parameters={part: count_parameters(checkpoint.folder(part)) for part in parts},
        layout=family.page_layout(DEFAULT_DTYPE) if info.can_edit else None,
        num_keyframes=DEFAULT_KEYFRAMES,
        latent_bytes=info.latent_width * checkpoint.dtype.itemsize,
        adapters=tuple(_describe_adapter(family, *adapter.split("=", 1)) for adapter in adapters),
    )


def _describe_adapter(family: Family, name: str, path: str) -> AdapterCard:
    adapter = read_adapter(AdapterConfig(name, path), family.lora_format)
    family.check_adapter(adapter)
    layers = [low for part in adapter.parts.values() for low in part.values()]
    ranks = [len(layer.down) for layer in layers]
    return AdapterCard(
        name=name,
        num_layers=len(layers),
        ranks=(min(ranks), max(ranks)),
        parameters=sum(layer.down.numel() + layer.up.numel() for layer in layers),
        defaults=adapter.defaults,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
