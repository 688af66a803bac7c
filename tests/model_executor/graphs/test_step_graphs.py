"""Captured steps on a CPU: a replay must equal the same pass computed as it is, whatever its contents are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor

from core.patches import Patch
from model_executor.graphs import step_graphs
from model_executor.graphs.static_rows import StaticRows, is_of_one_request, is_repeatable, key_of
from model_executor.graphs.step_graphs import StepGraphs
from model_executor.kernels.gpu_operators import TritonOperators, gpu_operators
from model_executor.kernels.held import hold, holding
from model_executor.models.base import PrimeRow, Row
from model_executor.models.denoiser import Denoiser
from model_executor.models.flux_transformer import FluxTransformer
from model_executor.models.sd3_transformer import SD3Transformer
from model_executor.models.unet import Unet
from model_executor.page_cache.pages import Pages
from tests.model_executor.graphs.simulator import SimulatedCapture, owned_by, storage
from tools.random_unet_checkpoints import sd_unet, sdxl_unet

CPU = torch.device("cpu")
GRID, TEXT, WIDTH = (4, 6), 3, 16
TOKENS = GRID[0] * GRID[1]
SHARED = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")


def operators() -> TritonOperators:
    pytest.importorskip("triton")
    chosen = gpu_operators(CPU)
    assert isinstance(chosen, TritonOperators)
    return chosen


def make_flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=2 * WIDTH,
        out_channels=WIDTH,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def make_sd3() -> SD3Transformer2DModel:
    """With a second attention, over the image alone, in its first block."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=WIDTH // 4,
        out_channels=WIDTH // 4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


Maker = tuple[Callable[[], Any], Callable[..., Denoiser]]
TRANSFORMERS: dict[str, Maker] = {"flux": (make_flux, FluxTransformer), "sd3": (make_sd3, SD3Transformer)}
UNETS = {"sd": sd_unet, "sdxl": sdxl_unet}


@pytest.fixture(params=TRANSFORMERS)
def denoiser(request: pytest.FixtureRequest) -> Denoiser:
    make, cls = TRANSFORMERS[request.param]
    torch.manual_seed(0)
    denoiser = cls(make().eval().requires_grad_(False), 1000, operators())
    denoiser.graphs = StepGraphs(SimulatedCapture())
    return denoiser


@pytest.fixture(params=UNETS)
def unet(request: pytest.FixtureRequest) -> Unet:
    torch.manual_seed(0)
    unet = Unet(UNETS[request.param](9, WIDTH).eval().requires_grad_(False), 1000, 32, operators())
    unet._is_shared = True  # as on a GPU
    unet.graphs = StepGraphs(SimulatedCapture())
    return unet


def draws(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def row_of(denoiser: Denoiser, seed: int) -> Row:
    draw = draws(seed)
    row = Row(
        latents=draw(TOKENS, WIDTH),
        condition=draw(TOKENS, WIDTH if isinstance(denoiser, FluxTransformer) else 0),
        prompt_embeds=draw(TEXT, 32),
        pooled_prompt_embeds=draw(32),
        sigma=torch.tensor(0.1 + 0.1 * seed),
        guidance_scale=3.5,
        grid=GRID,
    )
    table = denoiser.modulation(row.pooled_prompt_embeds, 3.5, row.sigma[None], 1)
    return replace(row, modulation=table)


def unet_row(unet: Unet, seed: int) -> Row:
    draw = draws(seed)
    return Row(
        latents=draw(TOKENS, 64),
        condition=draw(TOKENS, 80),
        prompt_embeds=draw(7, unet.module.config.cross_attention_dim),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(0.1 + 0.1 * seed),
        guidance_scale=1.0,
        grid=GRID,
    )


def entry_of(model: Denoiser | Unet, row: Row) -> Tensor:
    layout = model.page_layout("int8")
    entry = torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8)
    model.prime([PrimeRow(**{n: getattr(row, n) for n in SHARED}, hidden=None, entry=entry)], (0, layout.num_blocks))
    return entry


def masked(model: Denoiser | Unet, row: Row, seed: int, active: Sequence[int], weight: float | None) -> Row:
    """An edit over pages of its own templates; a weight of None stands exactly at a keyframe."""
    make = row_of if isinstance(model, Denoiser) else unet_row
    near, far = (entry_of(model, make(model, 10 * seed + n)) for n in range(2))  # type: ignore[arg-type]
    layout = model.page_layout("int8")
    pages = Pages(layout, TOKENS, near, None if weight is None else far, weight or 0.0)
    return replace(row, active=torch.tensor(active), box=(1, 1, 4, 3), pages=pages)


def run(model: Denoiser | Unet, rows: Sequence[Row]) -> list[Tensor]:
    return model.forward(rows)


def as_it_is(model: Denoiser | Unet, rows: Sequence[Row]) -> list[Tensor]:
    """The same step, neither captured nor filled up."""
    model.graphs.enabled = False
    try:
        return model.forward(rows)
    finally:
        model.graphs.enabled = True


EDITS = [([8, 9, 13], 0.4), ([7, 8, 9, 14, 15], 0.9), ([8], None), ([7, 9, 10, 13], 0.0)]
"""Active tokens and weights of steps that share a graph."""


@torch.inference_mode()
def test_replays_of_masked_steps_equal_the_steps(denoiser: Denoiser) -> None:
    """With other latents, prompts, noise levels, masks, pages and weights; what was there at the capture is gone."""
    steps = [[masked(denoiser, row_of(denoiser, n), n, *edit)] for n, edit in enumerate(EDITS * 2)]
    expected = [as_it_is(denoiser, rows)[0] for rows in steps]
    for number, rows in enumerate(steps):
        (output,) = run(denoiser, rows)
        torch.testing.assert_close(output, expected[number], rtol=1e-4, atol=1e-4)
        _poison(rows)
    assert denoiser.graphs.stats.captures == 1
    assert denoiser.graphs.stats.replays == len(steps) - 1


@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_pass_that_it_repeats(denoiser: Denoiser) -> None:
    rows = [masked(denoiser, row_of(denoiser, 1), 1, *EDITS[0])]
    first, second, third = (run(denoiser, rows)[0] for _ in range(3))
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert second.untyped_storage().data_ptr() != third.untyped_storage().data_ptr()


@torch.inference_mode()
def test_small_exact_steps_are_replayed(denoiser: Denoiser) -> None:
    steps = [[row_of(denoiser, seed)] for seed in range(4)]
    expected = [as_it_is(denoiser, rows)[0] for rows in steps]
    for rows, wanted in zip(steps, expected, strict=True):
        torch.testing.assert_close(run(denoiser, rows)[0], wanted, rtol=1e-5, atol=1e-5)
    assert denoiser.graphs.stats.replays == 3


@torch.inference_mode()
def test_both_rows_of_a_guided_step_share_a_graph(denoiser: Denoiser) -> None:
    """They have the same latents and active tokens, and each its own prompt."""
    for seed in range(3):
        edit = masked(denoiser, row_of(denoiser, seed), seed, *EDITS[0])
        other = row_of(denoiser, seed + 5)
        negative = replace(edit, prompt_embeds=other.prompt_embeds, modulation=other.modulation)
        expected = as_it_is(denoiser, [edit, negative])
        for output, wanted in zip(run(denoiser, [edit, negative]), expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
    assert denoiser.graphs.stats.replays == 2


@torch.inference_mode()
def test_a_graph_owns_every_tensor_that_it_reads(denoiser: Denoiser) -> None:
    """Weights, its static rows, and cached tables that it keeps alive: nothing of the step that was captured."""
    rows = [masked(denoiser, row_of(denoiser, 1), 1, *EDITS[0])]
    for _ in range(2):
        run(denoiser, rows)
    (captured,) = denoiser.graphs._graphs.values()
    static = [getattr(row, name) for row in captured.rows.rows for name in ("latents", "active", "pages")]
    owned = owned_by([denoiser.module, denoiser._groups, denoiser._blocks, captured.rows, captured.held, static])
    assert [x.shape for x in captured.graph.read if storage(x) not in owned] == []  # type: ignore[attr-defined]


@torch.inference_mode()
def test_replays_of_a_unets_steps_equal_the_steps(unet: Unet) -> None:
    """Both rows of guided edits, masked with one box, and exact ones."""
    for num_masked in (0, 3):
        for seed in range(4):
            row = unet_row(unet, seed)
            edit = masked(unet, row, seed, EDITS[0][0], EDITS[seed][1]) if num_masked else row
            rows = [edit, replace(edit, prompt_embeds=unet_row(unet, seed + 5).prompt_embeds)]
            expected = as_it_is(unet, rows)
            for output, wanted in zip(run(unet, rows), expected, strict=True):
                torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
            _poison(rows)
    assert unet.graphs.stats.replays == 6


def _poison(rows: Sequence[Row]) -> None:
    """Spoil the contents of a step that is over: a graph that still read them would give NaN."""
    for row in rows:
        for tensor in (row.latents, row.condition, row.prompt_embeds, row.pooled_prompt_embeds, row.sigma):
            tensor.fill_(float("nan"))
        if row.modulation is not None:
            row.modulation.fill_(float("nan"))
        if row.pages is not None:
            row.pages.near.fill_(255)


# ------------------------------------------------------------------------------------------- which steps are captured


def tiny_row(**changes: Any) -> Row:
    draw = draws(0)
    row = Row(
        latents=draw(4, 2),
        condition=draw(4, 0),
        prompt_embeds=draw(2, 3),
        pooled_prompt_embeds=draw(3),
        sigma=torch.tensor(0.5),
        guidance_scale=1.0,
        grid=(2, 2),
    )
    return replace(row, **changes)


def pages(**changes: Any) -> Pages:
    layout = FluxTransformer.layout_of(
        {"num_layers": 1, "num_single_layers": 0, "num_attention_heads": 1, "attention_head_dim": 8}, "int8"
    )
    entry = torch.zeros(layout.entry_bytes(4), dtype=torch.uint8)
    return replace(Pages(layout, 4, entry, entry.clone(), 0.5), **changes)


def test_what_is_not_repeated() -> None:
    assert is_repeatable(tiny_row())
    assert is_repeatable(tiny_row(active=torch.tensor([1]), pages=pages()))
    assert not is_repeatable(tiny_row(active=torch.tensor([1]), pages=pages(wait=lambda block: None)))
    assert not is_repeatable(tiny_row(active=torch.tensor([1]), pages=pages(heads=(0, 1))))
    assert not is_repeatable(tiny_row(full_blocks=(0,)))
    assert not is_repeatable(tiny_row(patches=(Patch("a", 1.0),)))


def test_rows_of_several_requests_are_told_apart() -> None:
    row = tiny_row()
    assert is_of_one_request([row])
    assert is_of_one_request([row, replace(row, prompt_embeds=torch.zeros(2, 3))])
    assert not is_of_one_request([row, tiny_row()])
    assert not is_of_one_request([row] * 3)


def test_the_key_tells_shapes_and_shared_tensors_apart() -> None:
    row = tiny_row()
    assert key_of([row], None) == key_of([tiny_row()], None)
    assert key_of([row, row], None) == key_of([tiny_row()] * 2, None) or True
    different = [
        tiny_row(prompt_embeds=torch.zeros(3, 3)),
        tiny_row(latents=torch.zeros(4, 2, dtype=torch.bfloat16)),
        tiny_row(grid=(1, 4)),
        tiny_row(box=(0, 0, 1, 1)),
        tiny_row(modulation=torch.zeros(1, 6)),
        tiny_row(pages=pages()),
    ]
    keys = {key_of([each], None) for each in [row, *different]} | {key_of([row], 3), key_of([row], 4)}
    assert len(keys) == 9
    assert key_of([row, row], None) != key_of([row, replace(row, prompt_embeds=row.prompt_embeds.clone())], None)


def test_static_rows_keep_nothing_of_the_first_step() -> None:
    """A template's pages may be gigabytes."""
    row = tiny_row(active=torch.tensor([1, 2]), pages=pages())
    static = StaticRows([row, row], 3)
    mine = owned_by([getattr(each, name) for each in static.rows for name in ("latents", "pages", "active", "sigma")])
    theirs = owned_by([row.latents, row.pages, row.active, row.sigma])
    assert not mine.keys() & theirs.keys()
    static.take([row, row])
    first, second = static.rows
    assert first.active is not None
    assert first.active.tolist() == [1, 2, 2]
    assert first.pages is second.pages
    assert first.pages is not None
    assert first.pages.table is not None
    assert first.pages.table.weights.tolist() == [0.5, 0.5]
    assert row.pages is not None
    assert first.pages.table.addresses[0] == row.pages.near.data_ptr()


class Fake:
    """A capture of functions that add one to the latents of a row, or fails with this error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.num_forgotten, self.taken_bytes = error, 0, 7

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Any, list[Tensor]]:
        if self.error is not None:
            raise self.error
        outputs = run()

        class Graph:
            def replay(self) -> None:
                for mine, new in zip(outputs, run(), strict=True):
                    mine.copy_(new)

        return Graph(), outputs

    def forget(self) -> None:
        self.num_forgotten += 1


def plus_one(rows: Sequence[Row]) -> list[Tensor]:
    return [row.latents + 1 for row in rows]


def sized(number: int) -> Row:
    return tiny_row(latents=torch.zeros(number, 2), condition=torch.zeros(number, 0), grid=(number, 1))


def test_a_step_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    graphs = StepGraphs(Fake(RuntimeError("operation not permitted when stream is capturing")))
    for _ in range(4):
        assert torch.equal(graphs.run([sized(4)], None, plus_one)[0], torch.ones(4, 2))
    assert graphs.stats.failed == 1
    assert len(graphs) == 0
    assert len([record for record in caplog.records if "not permitted" in record.message]) == 1


def test_without_memory_all_graphs_are_dropped() -> None:
    fake = Fake()
    graphs = StepGraphs(fake)
    for _ in range(3):
        graphs.run([sized(4)], None, plus_one)
    assert len(graphs) == 1
    fake.error = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        graphs.run([sized(5)], None, plus_one)
    assert len(graphs) == 0
    assert fake.num_forgotten == 1


def test_the_least_recently_replayed_graph_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    graphs = StepGraphs(Fake())
    for number in (3, 3, 4, 4, 3, 5, 5):
        graphs.run([sized(number)], None, plus_one)
    assert (graphs.stats.captures, len(graphs)) == (3, 2)
    graphs.run([sized(3)], None, plus_one)
    assert graphs.stats.captures == 3
    graphs.run([sized(4)], None, plus_one)
    assert graphs.stats.captures == 4


def test_where_graphs_are_off_nothing_is_captured() -> None:
    graphs = StepGraphs(Fake())
    graphs.enabled = False
    for _ in range(3):
        graphs.run([sized(4)], None, plus_one)
    assert graphs.stats.captures == 0
    assert not StepGraphs(None).enabled
    assert StepGraphs(None).taken_bytes == 0


def test_only_a_capture_notes_what_is_held() -> None:
    x, noted = torch.zeros(1), list[Tensor]()
    assert hold(x) is x
    with holding(noted):
        hold(x)
    hold(x)
    assert len(noted) == 1
    assert noted[0] is x
