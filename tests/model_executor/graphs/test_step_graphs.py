"""Captured steps on a CPU: a replay must equal the same pass computed as it is, whatever its contents are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from graph_simulator import SimulatedCapture, owned_by, storage
from torch import Tensor

from core.patches import Patch
from model_executor.graphs import step_graphs
from model_executor.graphs.static_rows import StaticRows, is_of_one_request, is_repeatable, key_of
from model_executor.graphs.step_graphs import StepGraphs
from model_executor.kernels.gpu_operators import TritonOperators, gpu_operators
from model_executor.kernels.held import hold, holding
from model_executor.kernels.linear import plain_linear
from model_executor.kernels.operators import Operators
from model_executor.models.base import ModulationInputs, Row
from model_executor.models.boxes import around
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.transformer.flux_transformer import FluxKontextTransformer, FluxTransformer
from model_executor.models.transformer.qwen_transformer import QwenEditTransformer
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import PageEntry, Pages

CPU = torch.device("cpu")
GRID, TEXT, WIDTH = (4, 3), 2, 16
TOKENS = GRID[0] * GRID[1]


def operators() -> TritonOperators:
    pytest.importorskip("triton")
    chosen = gpu_operators(CPU)
    assert isinstance(chosen, TritonOperators)
    return chosen


def make_flux(in_channels: int = 2 * WIDTH) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=in_channels,
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


def make_klein() -> Flux2Transformer2DModel:
    """Two blocks of each kind share a modulation."""
    return Flux2Transformer2DModel(
        in_channels=WIDTH,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def make_qwen_plus() -> QwenImageTransformer2DModel:
    """Condition tokens have a noise level of their own."""
    return QwenImageTransformer2DModel(
        in_channels=WIDTH,
        out_channels=WIDTH // 4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=True,
    )


def make_z_image() -> ZImageTransformer2DModel:
    """Prompt and picture are filled up to 32 tokens each."""
    module = ZImageTransformer2DModel(
        in_channels=WIDTH // 4,
        dim=16,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=1,
        n_kv_heads=1,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 16, 16],
    )
    for padding in (module.cap_pad_token, module.x_pad_token):
        torch.nn.init.normal_(padding)  # they are made without contents
    return module


Maker = tuple[Callable[[], Any], Callable[..., Denoiser]]
TRANSFORMERS: dict[str, Maker] = {
    "flux": (make_flux, FluxTransformer),
    "flux-kontext": (lambda: make_flux(WIDTH), FluxKontextTransformer),
    "klein": (make_klein, Flux2Transformer),
    "sd3": (make_sd3, SD3Transformer),
    "qwen-edit-plus": (make_qwen_plus, QwenEditTransformer),
    "z-image": (make_z_image, ZImageTransformer),
}


def make_denoiser(name: str) -> Denoiser:
    make, cls = TRANSFORMERS[name]
    torch.manual_seed(0)
    denoiser = cls(make().eval().requires_grad_(False), 1000, operators())
    denoiser.graphs = StepGraphs(SimulatedCapture())
    return denoiser


@pytest.fixture(params=TRANSFORMERS)
def denoiser(request: pytest.FixtureRequest) -> Denoiser:
    return make_denoiser(request.param)


@pytest.fixture
def unet() -> Unet:
    return make_unet()


def make_unet(**options: Any) -> Unet:
    torch.manual_seed(0)
    module = UNet2DConditionModel(
        in_channels=9,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=4,
        sample_size=8,
        **options,
    )
    unet = Unet(module.eval().requires_grad_(False), 1000, 32, operators())
    unet._is_shared = True  # as on a GPU
    unet.graphs = StepGraphs(SimulatedCapture())
    return unet


def draws(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def row_of(denoiser: Denoiser, seed: int) -> Row:
    """With what a run computes once."""
    draw = draws(seed)
    has_condition = isinstance(denoiser, FluxTransformer | QwenEditTransformer)
    row = Row(
        latents=draw(TOKENS, WIDTH),
        condition=draw(TOKENS, WIDTH if has_condition else 0),
        prompt_embeds=draw(TEXT, 32),
        pooled_prompt_embeds=draw(32),
        sigma=torch.tensor(0.1 + 0.1 * seed),
        guidance_scale=3.5,
        grid=GRID,
    )
    table = denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, 3.5, row.sigma[None], 1))
    return replace(row, modulation=table, prompt_state=denoiser.prompt_state(row.prompt_embeds, ()))


def unet_row(unet: Unet, seed: int) -> Row:
    draw = draws(seed)
    prompt_embeds = draw(7, unet.module.config.cross_attention_dim)
    return Row(
        latents=draw(TOKENS, 64),
        condition=draw(TOKENS, 80),
        prompt_embeds=prompt_embeds,
        prompt_state=unet.keys_values(prompt_embeds, ()),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(0.1 + 0.1 * seed),
        guidance_scale=1.0,
        grid=GRID,
    )


def entry_of(model: Denoiser | Unet, seed: int) -> Tensor:
    """int8 pages of a template, made of random numbers."""
    layout, draw = model.page_layout("int8"), draws(seed)
    data = torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8)
    entry = PageEntry(data, layout, TOKENS)
    for block in range(layout.num_blocks):
        moments = draw(layout.num_moments, TOKENS).abs() if layout.num_moments else None
        entry.write(block, draw(2, layout.num_heads, layout.num_rows(TOKENS), layout.head_dim), moments)
    return data


def masked(model: Denoiser | Unet, row: Row, seed: int, active: Sequence[int], weight: float | None) -> Row:
    """An edit over pages of its own templates; a weight of None stands exactly at a keyframe."""
    near, far = (entry_of(model, 100 + 2 * seed + number) for number in range(2))
    pages = Pages(model.page_layout("int8"), TOKENS, near, None if weight is None else far, weight or 0.0)
    tokens = torch.tensor(active)
    box = around(tokens, GRID[1]) if isinstance(model, Denoiser) else BOX  # as in a server; UNets' graphs have one box
    return replace(row, active=tokens, box=box, pages=pages)


def as_it_is(model: Denoiser | Unet, rows: Sequence[Row]) -> list[Tensor]:
    """The same step by PyTorch's operators, neither captured nor filled up."""
    if isinstance(model, Denoiser):
        return model.computing_with(Operators(plain_linear)).forward(rows)
    plain = Unet(deepcopy(model.module), 1000, 32, Operators(plain_linear))
    return plain.forward([replace(row, prompt_state=None) for row in rows])


EDITS = [([5, 6, 10], 0.4), ([4, 5, 6, 9, 10], 0.9), ([6], None), ([4, 6, 9, 10], 0.0)]
"""Active tokens and weights of steps that share a graph."""
BOX = (0, 1, 3, 3)


@torch.inference_mode()
def test_replays_of_masked_steps_equal_the_steps(denoiser: Denoiser) -> None:
    """With other latents, prompts, noise levels, masks, pages and weights; what was there at the capture is gone."""
    for seed, edit in enumerate(EDITS):
        rows = [masked(denoiser, row_of(denoiser, seed), seed, *edit)]
        (expected,) = as_it_is(denoiser, rows)
        (output,) = denoiser.forward(rows)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        if edit is EDITS[-1]:
            (again,) = denoiser.forward(rows)
            assert torch.equal(again, output)
            assert again.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
        _poison(rows)
    assert denoiser.graphs.stats.captures == 1
    assert denoiser.graphs.stats.replays == len(EDITS) - 1
    (captured,) = denoiser.graphs._graphs.values()
    _check_owned(denoiser, captured)


def _check_owned(denoiser: Denoiser, captured: Any) -> None:
    """A graph reads weights, its static rows, cached tables that it keeps alive, and no other that it has not made."""
    static = [getattr(row, name) for row in captured.rows.rows for name in ("latents", "active", "pages")]
    owned = owned_by([denoiser.module, denoiser._groups, denoiser._blocks, captured.rows, captured.held, static])
    assert [x.shape for x in captured.graph.read if storage(x) not in owned] == []


@torch.inference_mode()
def test_small_exact_steps_are_replayed(denoiser: Denoiser) -> None:
    for seed in range(3):
        rows = [row_of(denoiser, seed)]
        torch.testing.assert_close(denoiser.forward(rows)[0], as_it_is(denoiser, rows)[0], rtol=1e-4, atol=1e-4)
    assert denoiser.graphs.stats.replays == 1


@torch.inference_mode()
def test_both_rows_of_a_guided_step_share_a_graph() -> None:
    """They have the same latents and active tokens, and each its own prompt."""
    denoiser = make_denoiser("flux")
    for seed in range(3):
        edit = masked(denoiser, row_of(denoiser, seed), seed, *EDITS[0])
        other = row_of(denoiser, seed + 5)
        rows = [edit, replace(edit, prompt_embeds=other.prompt_embeds, modulation=other.modulation)]
        for output, expected in zip(denoiser.forward(rows), as_it_is(denoiser, rows), strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert denoiser.graphs.stats.replays == 1


@pytest.mark.parametrize("is_masked", [False, True])
@torch.inference_mode()
def test_replays_of_a_unets_steps_equal_the_steps(unet: Unet, is_masked: bool) -> None:
    """Both rows of guided edits, masked with one box, or exact ones."""
    for seed in range(3):
        row = unet_row(unet, seed)
        edit = masked(unet, row, seed, EDITS[0][0], EDITS[seed][1]) if is_masked else row
        other = unet_row(unet, seed + 5)
        rows = [edit, replace(edit, prompt_embeds=other.prompt_embeds, prompt_state=other.prompt_state)]
        expected = as_it_is(unet, rows)
        for output, wanted in zip(unet.forward(rows), expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
        _poison(rows)
    assert unet.graphs.stats.replays == 1


@pytest.mark.parametrize("act_fn", ["silu", "gelu"])
@torch.inference_mode()
def test_only_fused_blocks_are_captured_over_a_box(act_fn: str) -> None:
    """Residual blocks with another activation are not fused: they read moments from the entry, not by its table."""
    unet, box = make_unet(act_fn=act_fn), (0, 0, 1, 1)
    for seed in range(3):
        rows = [replace(masked(unet, unet_row(unet, seed), seed, [0], 0.4), box=box)]
        torch.testing.assert_close(unet.forward(rows)[0], as_it_is(unet, rows)[0], rtol=1e-4, atol=1e-4)
    assert unet.graphs.stats.failed == 0
    assert unet.graphs.stats.replays == (1 if act_fn == "silu" else 0)


def _poison(rows: Sequence[Row]) -> None:
    """Spoil the contents of a step that is over: a graph that still read them would give NaN."""
    for row in rows:
        for tensor in (row.latents, row.condition, row.prompt_embeds, row.pooled_prompt_embeds, row.sigma):
            tensor.fill_(float("nan"))
        for made in (row.modulation, row.prompt_state):
            if made is not None:
                made.fill_(float("nan"))
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
    assert key_of([row, row], None) == key_of([tiny_row()] * 2, None)
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

    def __init__(self, error: Exception | None = None, *, is_broken: bool = False) -> None:
        self.error, self.num_forgotten, self.taken_bytes, self.is_broken = error, 0, 7, is_broken

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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),  # while a graph is instantiated
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_without_memory_all_graphs_are_dropped_and_made_again_later(error: RuntimeError) -> None:
    fake = Fake()
    graphs = StepGraphs(fake)
    for _ in range(3):
        graphs.run([sized(4)], None, plus_one)
    assert len(graphs) == 1
    fake.error = error
    for _ in range(2):
        assert torch.equal(graphs.run([sized(5)], None, plus_one)[0], torch.ones(5, 2))
    assert len(graphs) == 0
    assert fake.num_forgotten == 1
    fake.error = None
    for _ in range(3):
        graphs.run([sized(5)], None, plus_one)
    assert len(graphs) == 1


def test_a_shape_that_cannot_be_captured_is_not_tried_again_once_graphs_are_dropped() -> None:
    fake = Fake(RuntimeError("operation not permitted when stream is capturing"))
    graphs = StepGraphs(fake)
    for _ in range(2):
        graphs.run([sized(4)], None, plus_one)
    graphs.clear()
    for _ in range(3):
        graphs.run([sized(4)], None, plus_one)
    assert graphs.stats.failed == 1


@pytest.mark.parametrize("error", [RuntimeError("capture invalidated"), torch.OutOfMemoryError("CUDA out of memory")])
def test_after_a_capture_that_could_not_be_ended_nothing_is_captured(error: RuntimeError) -> None:
    graphs = StepGraphs(Fake(error, is_broken=True))
    for number in (4, 4, 5, 5):
        assert torch.equal(graphs.run([sized(number)], None, plus_one)[0], torch.ones(number, 2))
    assert graphs.stats.failed == 1
    assert not graphs.enabled


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
        with holding([]):
            pass
        hold(x)
    hold(x)
    assert len(noted) == 1
    assert noted[0] is x
