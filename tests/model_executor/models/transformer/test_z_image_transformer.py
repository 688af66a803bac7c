"""Z-Image's denoiser: what `test_denoisers.py` has no case of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_denoisers import SETS, forward, make_row, of_z_image, put_adapters
from thread_groups import ThreadGroups

from model_executor.kernels.linear import plain_linear
from model_executor.kernels.operators import Operators
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from tools.random_checkpoints import z_image_transformer

WIDE = {"dim": 288, "n_heads": 9, "n_layers": 1, "n_refiner_layers": 1}
"""Wider than what its scales and gates are computed from."""


def make_module(**options: Any) -> Any:
    torch.manual_seed(0)
    return z_image_transformer(**options).eval()


@pytest.mark.parametrize(
    ("options", "grid", "text_tokens"),
    [
        (WIDE, (6, 8), 8),
        ({}, (4, 8), 32),  # nothing is filled up
        ({"n_refiner_layers": 2}, (3, 3), 33),
        ({"n_refiner_layers": 0}, (2, 3), 5),
    ],
)
def test_one_request_equals_the_module(options: dict[str, Any], grid: tuple[int, int], text_tokens: int) -> None:
    module = make_module(**options)
    row = make_row(ZImageTransformer, 3, grid, text_tokens)
    with torch.inference_mode():
        expected = of_z_image(module, row)
    (output,) = forward(ZImageTransformer(module, 1000, Operators(plain_linear)), [row])
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_prompts_own_layers_run_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a pass that has to run them, alone and on several ranks; they depend on the adapters."""
    denoiser = ZImageTransformer(make_module(), 1000)
    put_adapters(denoiser)
    rows = [replace(make_row(denoiser, 1, (3, 5), 40), patches=patches) for patches in SETS[:3]]
    states = [denoiser.prompt_state(row.prompt_embeds, row.patches) for row in rows]
    assert [len(state) for state in states] == [64] * 3
    assert not any(torch.allclose(states[0], state, atol=1e-2) for state in states[1:])
    known = [replace(row, prompt_state=state) for row, state in zip(rows, states, strict=True)]
    expected = denoiser.forward(rows)
    monkeypatch.setattr(denoiser, "_prompt_blocks", None)
    alike = [denoiser.forward(known), *ThreadGroups(2).run(lambda group: denoiser.forward(known, group), range(2))]
    for outputs in alike:
        assert all(map(torch.equal, outputs, expected))


def test_what_pages_keep_depends_on_no_prompt() -> None:
    """Templates are primed with another prompt than those of their edits."""
    denoiser, grid = ZImageTransformer(make_module(), 1000), (3, 3)
    short, long = (denoiser._rotary_table(tokens, (grid,))[-9:] for tokens in (32 + 23, 96 + 23))
    assert torch.equal(short, long)
