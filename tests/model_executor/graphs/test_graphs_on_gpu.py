"""CUDA graphs of steps on a GPU: `TRITON_INTERPRET=0 python -m pytest -m gpu`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import Tensor

from model_executor.kernels.operators import best_operators
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import Pages
from tools.random_checkpoints import z_image_transformer
from tools.random_unet_checkpoints import sdxl_unet

pytestmark = pytest.mark.gpu

SIDE, TEXT, WIDTH = 16, 40, 16
TOKENS = SIDE * SIDE
SHARED = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
Model = Denoiser | Unet


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.set_device(0)
    with torch.inference_mode():
        yield


def device() -> torch.device:
    return torch.device("cuda", 0)


def make_flux() -> FluxTransformer:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        module = FluxTransformer2DModel(
            in_channels=2 * WIDTH,
            out_channels=WIDTH,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        )
        module = module.to(device(), torch.bfloat16).eval().requires_grad_(False)
    return FluxTransformer(module, 1000, best_operators(device()))


def make_klein() -> Flux2Transformer:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        module = Flux2Transformer2DModel(
            in_channels=WIDTH,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=32,
            axes_dims_rope=(16, 16, 16, 16),
            guidance_embeds=False,
        )
        module = module.to(device(), torch.bfloat16).eval().requires_grad_(False)
    return Flux2Transformer(module, 1000, best_operators(device()))


def make_z_image() -> ZImageTransformer:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        module = z_image_transformer(
            in_channels=WIDTH // 4, dim=256, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[16, 24, 24]
        )
        module = module.to(device(), torch.bfloat16).eval().requires_grad_(False)
    return ZImageTransformer(module, 1000, best_operators(device()))


def make_unet() -> Unet:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        module = sdxl_unet(9, WIDTH).to(device(), torch.bfloat16).eval().requires_grad_(False)
    return Unet(module, 1000, 32, best_operators(device()))


MODELS: dict[str, Callable[[], Model]] = {
    "flux": make_flux,
    "klein": make_klein,
    "z-image": make_z_image,
    "sdxl": make_unet,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def row_of(model: Model, seed: int) -> Row:
    generator = torch.Generator(device()).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device(), dtype=torch.bfloat16)

    is_unet = isinstance(model, Unet)
    condition = 80 if is_unet else 0 if isinstance(model, ZImageTransformer) else WIDTH
    row = Row(
        latents=draw(TOKENS, 64 if is_unet else WIDTH),
        condition=draw(TOKENS, condition),
        prompt_embeds=draw(TEXT, model.module.config.cross_attention_dim if is_unet else 32),
        pooled_prompt_embeds=draw(WIDTH if is_unet else 32),
        sigma=torch.tensor(0.1 + 0.05 * seed, device=device()),
        guidance_scale=3.5,
        grid=(SIDE, SIDE),
    )
    if isinstance(model, Unet):
        return row
    table = model.modulation(ModulationInputs(row.pooled_prompt_embeds, 3.5, row.sigma[None], 1))
    return replace(row, modulation=table, prompt_state=model.prompt_state(row.prompt_embeds, ()))


def edit_of(model: Model, seed: int, num_active: int, weight: float | None) -> Row:
    layout = model.page_layout("int8")
    entries = list[Tensor]()
    for number in range(2):
        row = row_of(model, 50 + 2 * seed + number)
        entry = torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8, device=device())
        template = PrimeRow(**{name: getattr(row, name) for name in SHARED}, hidden=None, entry=entry)
        model.prime([template], (0, layout.num_blocks))
        entries.append(entry)
    tokens = torch.arange(TOKENS).view(SIDE, SIDE)[4:10, 3:12].flatten()[:num_active]
    pages = Pages(layout, TOKENS, entries[0], None if weight is None else entries[1], weight or 0.0)
    return replace(row_of(model, seed), active=tokens.to(device()), box=(3, 4, 12, 10), pages=pages)


def eager(model: Model, rows: Sequence[Row]) -> list[Tensor]:
    model.graphs.enabled = False
    try:
        return model.forward(rows)
    finally:
        model.graphs.enabled = True


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.02


STEPS = [(50, 0.4), (54, 0.9), (45, None), (50, 0.0), (48, 0.7)]


def test_a_replay_has_the_bits_of_the_pass_that_it_repeats(model: Model) -> None:
    rows = [edit_of(model, 1, 50, 0.4)]
    first, *others = (model.forward(rows)[0] for _ in range(4))
    assert model.graphs.stats.replays == 2
    assert all(torch.equal(first, other) for other in others)


def test_replays_follow_their_contents(model: Model) -> None:
    """Other latents, prompts, pages, weights and, in a transformer, masks of other sizes."""
    for number, (num_active, weight) in enumerate(STEPS):
        rows = [edit_of(model, number, 50 if isinstance(model, Unet) else num_active, weight)]
        (expected,) = eager(model, rows)
        (output,) = model.forward(rows)
        assert is_close(output, expected), (number, num_active, weight)
    assert model.graphs.stats.captures == 1
    assert model.graphs.stats.replays == len(STEPS) - 2


def test_guided_and_exact_steps(model: Model) -> None:
    for number in range(3):
        edit, other = edit_of(model, number, 50, 0.4), row_of(model, number + 10)
        negative = replace(
            edit, prompt_embeds=other.prompt_embeds, prompt_state=other.prompt_state, modulation=other.modulation
        )
        for rows in ([edit, negative], [row_of(model, number)]):
            for output, expected in zip(model.forward(rows), eager(model, rows), strict=True):
                assert is_close(output, expected)
    assert model.graphs.stats.replays == 2


def test_what_other_threads_do_does_not_break_a_capture(model: Model) -> None:
    """Copies on another stream, new memory, and waiting for events, as of pages and of weights being loaded."""
    ends, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            torch.cuda.set_device(0)
            stream, host = torch.cuda.Stream(), torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)
            while not ends.is_set():
                with torch.cuda.stream(stream):
                    x = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
                    x.copy_(host, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(stream)
                event.synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for shape in range(4):
            rows = [edit_of(model, shape, 50 - 8 * shape, 0.4)]
            for _ in range(3):
                (output,) = model.forward(rows)
            assert is_close(output, eager(model, rows)[0])
    finally:
        ends.set()
        thread.join()
    assert not failures
    assert model.graphs.stats.failed == 0


def test_graphs_are_made_again_after_they_were_dropped(model: Model) -> None:
    rows = [edit_of(model, 1, 50, 0.4)]
    outputs: list[Any] = []
    for _ in range(3):
        outputs += [model.forward(rows)[0] for _ in range(3)]
        model.graphs.clear()
        assert model.graphs.taken_bytes == 0
        torch.cuda.empty_cache()
    assert model.graphs.stats.captures == 3
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_a_capture_that_was_made_invalid_leaves_the_allocator_sound(model: Model) -> None:
    """Waiting for the device during a capture makes it invalid: graphs are off from then on, and memory is freed."""
    rows = [edit_of(model, 1, 50, 0.4)]
    (expected,) = eager(model, rows)

    def waits(alike: Sequence[Row]) -> list[Tensor]:
        outputs = model._forward(alike) if isinstance(model, Denoiser) else model._run_masked(alike)
        outputs[0].sum().item()
        return outputs

    for _ in range(2):
        (output,) = model.graphs.run(rows, 50, waits)
        assert is_close(output, expected)
    assert model.graphs.stats.failed == 1
    assert not model.graphs.enabled
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    room = torch.empty(1 << 28, dtype=torch.uint8, device=device())
    del room
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert is_close(model.forward(rows)[0], expected)
