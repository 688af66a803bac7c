"""The benchmark of adapters in a step, on blocks small enough for a test."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.micro import lora_step
from benchmarks.micro.lora_step import BATCHES, RANK, Bench, Shape, main

TINY = Shape(
    "tiny",
    lora_step.FLUX_SHAPE | {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 1},
    side=4,
    active=3,
    text_tokens=5,
    bar=0.0,
)


@torch.inference_mode()
def test_the_bound_counts_what_an_adapter_adds() -> None:
    """To a token's linear layers: those of one stream of a double block, and of the single blocks."""
    plain, added = Bench(TINY, torch.float32)._operations()
    width, keys = 64, 4 * 4 + 5
    attention = 3 * 2 * keys * width
    assert plain - attention == width**2 * ((3 + 1 + 4 + 4) + 2 * (3 + 4 + 5))
    layers = [(1, 3, 3), (1, 1, 1), (1, 4, 1), (4, 1, 1), *2 * [(1, 3, 3), (1, 4, 1), (5, 1, 1)]]
    assert added == RANK * width * sum(inputs * number + outputs for inputs, outputs, number in layers)


def test_it_prints_a_speed_for_every_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lora_step, "SHAPES", {512: TINY})
    main(["--rounds", "1", "--threads", str(torch.get_num_threads())])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) == len(BATCHES) + 3
    assert sum(name.startswith("speed_") for name in result) == len(BATCHES)
    assert all(result[name] > 0 for name in result if name.startswith("speed_"))
