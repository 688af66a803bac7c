"""Every family's denoiser: against its diffusers module, in a batch, and with active tokens over a template's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_groups import ThreadGroups
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.page_scheme import PageDtype
from core.patches import Patch
from model_executor.checkpoint.quantization import Int8Linear, for_device, pack_int8
from model_executor.kernels import linear_groups
from model_executor.kernels.cpu_kernels import best_kernels
from model_executor.kernels.linear import plain_linear
from model_executor.kernels.low_rank import LowRank
from model_executor.kernels.operators import Operators
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.latents import pack, unpack
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.dit_transformer import DiTTransformer
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.transformer.flux_transformer import FluxKontextTransformer, FluxTransformer
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.qwen_transformer import QwenEditTransformer, QwenTransformer
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.models.transformer.z_image_transformer import ZImageTransformer
from model_executor.page_cache.pages import Pages
from model_executor.patches.adapters import Adapter
from tools.random_checkpoints import (
    flux2_transformer,
    flux_transformer,
    qwen_transformer,
    sd3_transformer,
    z_image_transformer,
)
from tools.random_dit_checkpoints import TINY, dit_transformer

WIDTH = 64
LAYERS = (nn.Linear, nn.Conv2d, Int8Linear)
ROWS = [((6, 8), 8), ((3, 5), 8), ((8, 2), 11), ((1, 1), 5)]
"""(grid, text tokens) of requests that share a batch."""

ACTIVE = torch.tensor([3, 4, 5, 11, 12, 13, 30, 47])


@dataclass(frozen=True)
class Case:
    """A small random module, its denoiser, and the inputs that diffusers' pipeline would pass to the module."""

    module: Callable[[], Any]
    denoiser: type[Denoiser]
    reference: Callable[[Any, Row], Tensor]
    num_pages: int
    only_squares: bool = False  # the module takes no other pictures


def of_flux(module: Any, row: Row) -> Tensor:
    """The case of FLUX.1, with the template's tokens if the row has them."""
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(row.grid[0])), torch.arange(float(row.grid[1])))
    hidden, every = row.latents, ids
    if row.condition.numel():
        hidden, every = torch.cat([row.latents, row.condition]), torch.cat([ids, ids + torch.tensor([1.0, 0.0, 0.0])])
    output: Tensor = module(
        hidden_states=hidden[None],
        timestep=row.sigma.expand(1),
        guidance=torch.full([1], row.guidance_scale) if module.config.guidance_embeds else None,
        pooled_projections=row.pooled_prompt_embeds[None],
        encoder_hidden_states=row.prompt_embeds[None],
        txt_ids=torch.zeros(row.prompt_embeds.shape[0], 3),
        img_ids=every,
        return_dict=False,
    )[0][0]
    return output[: len(row.latents)]


def of_klein(module: Any, row: Row) -> Tensor:
    """With the template's tokens if the row has them."""
    sides = [torch.arange(float(side)) for side in row.grid]
    times = torch.tensor([0.0, 10.0])[: 1 + bool(len(row.condition))]
    text = torch.zeros(len(row.prompt_embeds), 4)
    text[:, 3] = torch.arange(len(text))
    dtype = row.latents.dtype
    output: Tensor = module(
        hidden_states=torch.cat([row.latents, row.condition])[None],
        timestep=(row.sigma * 1000).expand(1).to(dtype) / 1000,
        encoder_hidden_states=row.prompt_embeds[None],
        txt_ids=text,
        img_ids=torch.cartesian_prod(times, *sides, torch.zeros(1)),
        return_dict=False,
    )[0][0]
    return output[: len(row.latents)]


def of_sd3(module: Any, row: Row) -> Tensor:
    output = module(
        hidden_states=unpack(row.latents, row.grid),
        timestep=(row.sigma * 1000).expand(1),
        pooled_projections=row.pooled_prompt_embeds[None],
        encoder_hidden_states=row.prompt_embeds[None],
        return_dict=False,
    )[0]
    return pack(output)


def of_qwen(module: Any, row: Row) -> Tensor:
    """The case of Qwen-Image, with the template's tokens if the row has them."""
    hidden, pictures = [row.latents], [(1, *row.grid)]
    if row.condition.numel():
        hidden, pictures = [row.latents, row.condition], pictures * 2
    output: Tensor = module(
        hidden_states=torch.cat(hidden)[None],
        timestep=row.sigma.expand(1),
        encoder_hidden_states=row.prompt_embeds[None],
        img_shapes=[pictures],
        return_dict=False,
    )[0][0]
    return output[: len(row.latents)]


def of_z_image(module: Any, row: Row) -> Tensor:
    time, frames = (1000 - row.sigma * 1000) / 1000, unpack(row.latents, row.grid)[0][:, None]
    (output,) = module([frames], time[None], [row.prompt_embeds], return_dict=False)[0]
    return -pack(output[:, 0][None])


def of_dit(module: Any, row: Row) -> Tensor:
    """With the row's embeddings of a class, which it has of no label."""
    module, embeds = deepcopy(module), row.pooled_prompt_embeds.chunk(len(module.transformer_blocks))
    for block, embed in zip(module.transformer_blocks, embeds, strict=True):
        block.norm1.emb.class_embedder = nn.Module()
        block.norm1.emb.class_embedder.forward = lambda labels, embed=embed: embed[None]
    output = module(unpack(row.latents, row.grid), (row.sigma * 1000).round()[None], torch.zeros(1), return_dict=False)
    return pack(output[0])[:, : row.latents.shape[1]]


def klein() -> Any:
    return flux2_transformer(joint_attention_dim=WIDTH)


def sd3(**options: Any) -> Callable[[], Any]:
    return lambda: sd3_transformer(WIDTH, WIDTH, **options)


DIT_BLOCKS = 3


def dit() -> Any:
    return dit_transformer(**TINY | {"num_layers": DIT_BLOCKS, "in_channels": 16, "out_channels": 32})


qwen_2511 = partial(qwen_transformer, zero_cond_t=True)

CASES = {
    "flux-dev": Case(lambda: flux_transformer(WIDTH, True, 64), FluxTransformer, of_flux, 3),
    "flux-schnell": Case(lambda: flux_transformer(WIDTH, False, 64), FluxTransformer, of_flux, 3),
    "flux-kontext": Case(lambda: flux_transformer(WIDTH, True, 64), FluxKontextTransformer, of_flux, 3),
    "klein": Case(klein, Flux2Transformer, of_klein, 4),
    "sd3": Case(sd3(qk_norm=None, dual_attention_layers=()), SD3Transformer, of_sd3, 3),
    "sd3.5-large": Case(sd3(dual_attention_layers=()), SD3Transformer, of_sd3, 3),
    "sd3.5-medium": Case(sd3(dual_attention_layers=(0, 1)), SD3Transformer, of_sd3, 5),
    "second-attention-last": Case(sd3(dual_attention_layers=(2,)), SD3Transformer, of_sd3, 4),
    "qwen": Case(qwen_transformer, QwenTransformer, of_qwen, 3),
    "qwen-edit": Case(qwen_transformer, QwenEditTransformer, of_qwen, 3),
    "qwen-edit-2511": Case(qwen_2511, QwenEditTransformer, of_qwen, 3),
    "z-image": Case(z_image_transformer, ZImageTransformer, of_z_image, 3),
    "dit": Case(dit, DiTTransformer, of_dit, DIT_BLOCKS, only_squares=True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def module(case: Case) -> Any:
    torch.manual_seed(0)
    return case.module().eval()


@pytest.fixture(scope="module")
def denoiser(case: Case, module: Any) -> Denoiser:
    return case.denoiser(module, 1000)


Kind = Denoiser | type[Denoiser]


def make_row(kind: Kind, seed: int, grid: tuple[int, int] = (6, 8), text_tokens: int = 8) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, has_text = grid[0] * grid[1], not issubclass(kind if isinstance(kind, type) else type(kind), DiTTransformer)
    return Row(
        latents=draw(tokens, 64),
        condition=draw(tokens, 64) if kind.rows_per_token == 2 else torch.empty(tokens, 0),
        prompt_embeds=draw(text_tokens, WIDTH) if has_text else torch.empty(0, 0),
        pooled_prompt_embeds=draw(WIDTH if has_text else DIT_BLOCKS * WIDTH),
        sigma=torch.rand((), generator=generator),
        guidance_scale=1.0 + seed,
        grid=grid,
    )


@torch.inference_mode()
def forward(denoiser: Denoiser, rows: Sequence[Row]) -> list[Tensor]:
    return denoiser.forward(rows)


def prime_row(denoiser: Denoiser, row: Row, dtype: PageDtype = "float32") -> PrimeRow:
    """A row that primes the same inputs; its pages start with values that would be noticed."""
    entry = torch.full([denoiser.page_layout(dtype).entry_bytes(len(row.latents))], 0x7F, dtype=torch.uint8)
    shared = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
    return PrimeRow(**{name: getattr(row, name) for name in (*shared, "patches")}, hidden=None, entry=entry)


@torch.inference_mode()
def prime(denoiser: Denoiser, row: PrimeRow, cuts: Sequence[int] = ()) -> None:
    """Prime all pages, in chunks that end at `cuts`."""
    for start, stop in zip([0, *cuts], [*cuts, denoiser.num_pages], strict=True):
        (state,) = denoiser.prime([row], (start, stop))
        row = replace(row, hidden=state)
    assert row.hidden == ()


def primed(denoiser: Denoiser, row: Row, active: Tensor = ACTIVE, dtype: PageDtype = "float32") -> Row:
    """The row with these tokens active, over pages of its own inputs."""
    template = prime_row(denoiser, row, dtype)
    prime(denoiser, template)
    layout = denoiser.page_layout(dtype)
    return replace(row, active=active, pages=Pages(layout, len(row.latents), template.entry, None, 0.0))


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_one_request_equals_the_module(case: Case, module: Any, number: int) -> None:
    (rows, columns), text_tokens = ROWS[number]
    row = make_row(case.denoiser, number, (rows, rows if case.only_squares else columns), text_tokens)
    with torch.inference_mode():
        expected = case.reference(module, row)
    (output,) = forward(case.denoiser(module, 1000, Operators(plain_linear)), [row])
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flux-kontext", "qwen-edit-2511"])
def test_a_picture_of_nothing_has_no_condition_tokens(name: str, groups: ThreadGroups) -> None:
    """Alone, beside edits, and on several ranks."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.module().eval()
    denoiser = case.denoiser(module, 1000)
    row = replace(make_row(denoiser, 3), condition=torch.empty(0, 64))
    with torch.inference_mode():
        expected = case.reference(module, row)
    rows = [make_row(denoiser, 4), row, primed(denoiser, make_row(denoiser, 5))]
    (alone,) = forward(denoiser, [row])
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(forward(denoiser, rows)[1], alone)
    for outputs in groups.run(lambda group: denoiser.forward(rows, group), range(3)):
        assert torch.equal(outputs[1], alone)


@torch.inference_mode()
def test_adapters_change_condition_tokens_at_their_own_noise_level() -> None:
    """As the module with weights that have the adapter's additions."""
    torch.manual_seed(0)
    module = qwen_2511().eval()
    denoiser, row = QwenEditTransformer(deepcopy(module), 1000), make_row(QwenEditTransformer, 2)
    put_adapters(denoiser)
    for name, low in random_layers(module, 1, torch.Generator().manual_seed(3)).items():
        module.get_submodule(name).weight += 0.3 * low.up @ low.down
    (output,) = forward(denoiser, [replace(row, patches=(Patch("a", 0.3),))])
    torch.testing.assert_close(output, of_qwen(module, row), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(output, forward(denoiser, [row])[0], atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_template", [True, False])
@torch.inference_mode()
def test_klein_is_bit_identical(dtype: torch.dtype, has_template: bool) -> None:
    """With layers run as PyTorch runs them; of a picture that is made of nothing the denoiser sees no template."""
    torch.manual_seed(0)
    module = klein().to(dtype).eval()
    denoiser = Flux2Transformer(module, 1000, Operators(plain_linear))
    for number, shape in enumerate(ROWS):
        row = make_row(denoiser, number, *shape)
        names = "latents", "condition", "prompt_embeds"
        row = replace(row, **{name: getattr(row, name).to(dtype) for name in names})
        row = row if has_template else replace(row, condition=row.condition[:0])
        assert torch.equal(denoiser.forward([row])[0], of_klein(module, row))


@torch.inference_mode()
def test_a_shared_modulation_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass, and in a table."""
    denoiser = Flux2Transformer(klein().eval(), 1000)
    made, product = list[Modulation](), Modulation.product

    def noted(self: Modulation, *args: Any) -> Tensor:
        made.append(self)
        return product(self, *args)

    monkeypatch.setattr(Modulation, "product", noted)
    (output,) = denoiser.forward([row := make_row(denoiser, 0)])
    assert len(made) == len({*made}) == 3
    row = tabled(denoiser, row)
    assert row.modulation is not None
    assert row.modulation.shape == (1, (12 + 3 + 2) * WIDTH)
    assert torch.equal(denoiser.forward([row])[0], output)
    assert len(made) == 6


def test_pictures_with_and_without_a_template_share_a_batch() -> None:
    denoiser = Flux2Transformer(klein().eval(), 1000)
    rows = [make_row(denoiser, number, *shape) for number, shape in enumerate(ROWS)]
    rows[1], rows[3] = (replace(row, condition=row.condition[:0]) for row in (rows[1], rows[3]))
    alone = [forward(denoiser, [row])[0] for row in rows]
    for number, output in enumerate(forward(denoiser, rows)):
        assert torch.equal(output, alone[number])


def test_bits_do_not_depend_on_the_batch(denoiser: Denoiser) -> None:
    """Exact and mask-aware, sizes and text lengths: alone or with any others."""
    rows = [make_row(denoiser, number, *shape) for number, shape in enumerate(ROWS)]
    rows += [
        primed(denoiser, make_row(denoiser, 7)),
        replace(primed(denoiser, make_row(denoiser, 8)), full_blocks=range(1)),
    ]
    alone = [forward(denoiser, [row])[0] for row in rows]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2], [4, 4]):
        for index, output in zip(order, forward(denoiser, [rows[i] for i in order]), strict=True):
            assert torch.equal(output, alone[index])


@pytest.fixture(scope="module")
def groups() -> ThreadGroups:
    return ThreadGroups(5)


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_bits_do_not_depend_on_the_degree(adapted: Denoiser, groups: ThreadGroups, degree: int) -> None:
    """Exact and mask-aware, alone and in batches, with patches; of 4 heads, by members with unequal shares or none.

    By 5 members each kind of row alone, and batches of several; by fewer, whose shares are larger, an exact row, one
    with a single active token, and all together.
    """
    rows = [
        replace(make_row(adapted, number, *shape), patches=patches)
        for number, (shape, patches) in enumerate(zip(ROWS, SETS, strict=False))
    ]
    rows += [
        primed(adapted, replace(make_row(adapted, 7), patches=SETS[2])),
        replace(primed(adapted, make_row(adapted, 8)), full_blocks=range(1)),
        replace(primed(adapted, make_row(adapted, 9), torch.tensor([17])), full_blocks=range(2)),
    ]
    alone = [forward(adapted, [row])[0] for row in rows]
    orders = [[0], [6], [0, 1, 2, 3, 4, 5, 6]]
    if degree == 5:
        orders += [[3], [4], [5], [6, 4, 0]]
    for order in orders:
        some = [rows[index] for index in order]
        for outputs in groups.run(lambda group, some=some: adapted.forward(some, group), range(degree)):
            for index, output in zip(order, outputs, strict=True):
                assert torch.equal(output, alone[index]), (order, index)


@pytest.fixture(scope="module")
def in_bfloat16(case: Case) -> Denoiser:
    """With adapters."""
    if best_kernels() is None:
        pytest.skip("no compiled kernels on this machine")
    torch.manual_seed(0)
    denoiser = case.denoiser(case.module().eval().to(torch.bfloat16), 1000)
    put_adapters(denoiser)
    return denoiser


def bfloat16_row(denoiser: Denoiser, seed: int, shape: tuple[tuple[int, int], int] = ROWS[0], number: int = 0) -> Row:
    """With the patches of this number."""
    row, names = make_row(denoiser, seed, *shape), ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds")
    inputs = {name: getattr(row, name).to(torch.bfloat16) for name in names}
    return replace(row, patches=SETS[number], **inputs)


def test_in_bfloat16_bits_depend_neither_on_the_batch_nor_on_the_degree(
    in_bfloat16: Denoiser, case: Case, module: Any, groups: ThreadGroups
) -> None:
    """Exact and mask-aware, with patches and without, alone and in batches of 2 to 8, by one to three members. And they
    are those of the module in float32, within rounding."""
    denoiser = in_bfloat16
    rows = [bfloat16_row(denoiser, number, shape, number) for number, shape in enumerate(ROWS)]
    rows += [
        primed(denoiser, bfloat16_row(denoiser, 7, number=2), dtype="int8"),
        replace(primed(denoiser, bfloat16_row(denoiser, 8), dtype="bfloat16"), full_blocks=range(1)),
        primed(denoiser, bfloat16_row(denoiser, 9, number=1), torch.tensor([17]), dtype="int8"),
    ]
    alone = [forward(denoiser, [row])[0] for row in rows]
    wide = {name: getattr(rows[0], name).float() for name in ("latents", "condition", "prompt_embeds")}
    wide["pooled_prompt_embeds"] = rows[0].pooled_prompt_embeds.float()
    (expected,) = forward(case.denoiser(module, 1000), [replace(rows[0], **wide)])
    assert (alone[0].float() - expected).square().mean() < 1e-3 * expected.square().mean()
    for order in ([0, 5], [6, 3, 1], [1, 2, 4, 0], [0, 1, 2, 3, 4, 5, 6, 4]):
        some = [rows[index] for index in order]
        results = [forward(denoiser, some)]
        for degree in (2, 3):
            results += groups.run(lambda group, some=some: denoiser.forward(some, group), range(degree))
        for outputs in results:
            for index, output in zip(order, outputs, strict=True):
                assert torch.equal(output, alone[index]), (order, index)


class Products(TorchDispatchMode):
    """The largest number of rows of the products, convolutions and attentions that are PyTorch's and oneDNN's."""

    rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in str(function) for part in ("linear", "mm", "conv", "attention")):
            self.rows = max(self.rows, args[0][..., 0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_int8", [False, True])
def test_in_bfloat16_with_amx_our_kernels_alone_multiply(
    case: Case, is_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows aside, of which oneDNN makes two; also of a denoiser that counts as large. oneDNN rounds rows of
    layers as wide as real ones are by their number, and those of the small layers of these tests alike."""
    kernels = best_kernels()
    if kernels is None or not kernels.has_tiles:
        pytest.skip("no AMX on this machine")
    monkeypatch.setattr(linear_groups, "PACKED_BYTES", 0)
    module = case.module().eval().to(torch.bfloat16)
    if is_int8:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
        pack_int8(for_device(module, torch.device("cpu")), kernels)
    put_adapters(denoiser := case.denoiser(module, 1000))
    rows = [bfloat16_row(denoiser, number, shape, number) for number, shape in enumerate(ROWS)]
    rows += [primed(denoiser, bfloat16_row(denoiser, 7, number=2), dtype=dtype) for dtype in ("int8", "bfloat16")]
    with torch.inference_mode(), Products() as products:
        denoiser.forward(rows)
    assert products.rows <= 2


def test_in_bfloat16_own_content_gives_the_bits_of_the_exact_pass(in_bfloat16: Denoiser) -> None:
    row = bfloat16_row(in_bfloat16, 0)
    (exact,) = forward(in_bfloat16, [row])
    (output,) = forward(in_bfloat16, [primed(in_bfloat16, row, dtype="bfloat16")])
    assert torch.equal(output, exact[ACTIVE])


def test_bits_do_not_depend_on_the_degree_with_int8_weights_and_pages(case: Case, groups: ThreadGroups) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    module = case.module().eval()
    plain = forward(case.denoiser(module, 1000), [row := make_row(case.denoiser, 0)])[0]
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    denoiser = case.denoiser(for_device(module, torch.device("cpu")), 1000)
    rows = [row, primed(denoiser, make_row(denoiser, 7), dtype="int8"), make_row(denoiser, 3, (4, 4), 11)]
    alone = [forward(denoiser, [row])[0] for row in rows]
    assert not torch.equal(alone[0], plain), "weights are quantised"
    for outputs in groups.run(lambda group: denoiser.forward(rows, group), range(3)):
        assert all(map(torch.equal, outputs, alone))


SETS = [(), (Patch("a"),), (Patch("a"), Patch("b", -0.5)), (Patch("b", 0.7),), (Patch("a", 0.3),), ()]


@pytest.fixture(scope="module")
def adapted(case: Case, module: Any) -> Denoiser:
    denoiser = case.denoiser(module, 1000)
    put_adapters(denoiser)
    return denoiser


def put_adapters(denoiser: Denoiser) -> None:
    """Two adapters, one of every layer and one of every other one."""
    generator = torch.Generator().manual_seed(3)
    for patch, step in (("a", 1), ("b", 2)):
        adapter = Adapter(patch, Path(f"{patch}.safetensors"), patch, {})
        denoiser.patches.put(patch, denoiser.patches.prepare(adapter, random_layers(denoiser.module, step, generator)))


def random_layers(module: Any, step: int, generator: torch.Generator) -> dict[str, LowRank]:
    """Random additions to every `step`-th layer."""
    layers = dict(list(module.named_modules())[::step])
    sizes = {name: size_of(each) for name, each in layers.items() if isinstance(each, LAYERS)}
    return {
        name: LowRank(
            torch.randn(3, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, 3, generator=generator) / 2,
        )
        for name, (outputs, inputs) in sizes.items()
    }


def size_of(layer: Any) -> tuple[int, int]:
    """(outputs, inputs)"""
    if isinstance(layer, nn.Conv2d):
        return len(layer.weight), layer.weight[0].numel()
    return layer.out_features, layer.in_features


@torch.inference_mode()
def test_bits_do_not_depend_on_the_patches_of_others(denoiser: Denoiser, adapted: Denoiser) -> None:
    """Exact and mask-aware, with and without a modulation table; a row without patches is as in a model without."""
    shapes = [*ROWS, ((6, 8), 8), ((6, 8), 8)]
    rows = [
        replace(make_row(denoiser, number, *shape), patches=patches)
        for number, (shape, patches) in enumerate(zip(shapes, SETS, strict=True))
    ]
    rows += [primed(adapted, replace(make_row(denoiser, 7), patches=patches)) for patches in SETS[:3]]
    rows.append(replace(rows[-1], full_blocks=range(1)))
    alone = [forward(adapted, [row])[0] for row in rows]
    for index, plain in [(0, rows[0]), (5, rows[5]), (6, rows[6])]:
        assert torch.equal(alone[index], forward(denoiser, [plain])[0])
    with_table = [tabled(adapted, row) for row in rows]
    for order in (range(10), [9, 1, 8, 2, 7, 3, 6, 4, 5, 0], [3, 3, 4, 1]):
        for some in (rows, with_table):
            for index, output in zip(order, forward(adapted, [some[i] for i in order]), strict=True):
                assert torch.equal(output, alone[index])
    assert len({output.numpy().tobytes() for output in alone[6:]}) == 3


def tabled(denoiser: Denoiser, row: Row) -> Row:
    """The row with its modulation computed before."""
    of_row = row.pooled_prompt_embeds, row.guidance_scale, row.sigma[None], 1, row.patches
    return replace(row, modulation=denoiser.modulation(ModulationInputs(*of_row)))


@torch.inference_mode()
def test_templates_of_other_patches_are_primed_together(adapted: Denoiser) -> None:
    rows = [replace(make_row(adapted, number), patches=patches) for number, patches in enumerate(SETS)]
    alone, together = ([prime_row(adapted, row) for row in rows] for _ in range(2))
    for row in alone:
        prime(adapted, row)
    hidden = adapted.prime(together, (0, 1))
    adapted.prime([replace(row, hidden=its) for row, its in zip(together, hidden, strict=True)], (1, adapted.num_pages))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.entry, other.entry)


@pytest.mark.parametrize("active", [ACTIVE, torch.arange(1, 48), torch.tensor([17])])
def test_own_content_gives_the_bits_of_the_exact_pass(denoiser: Denoiser, active: Tensor) -> None:
    """If pages contain what the request itself would compute, omitting tokens changes nothing."""
    row = make_row(denoiser, 0)
    (exact,) = forward(denoiser, [row])
    (output,) = forward(denoiser, [primed(denoiser, row, active)])
    assert torch.equal(output, exact[active])


def test_full_blocks_on_own_inputs(denoiser: Denoiser) -> None:
    """For any number of pages still missing: blocks that need one of them compute all tokens."""
    row = make_row(denoiser, 5)
    (exact,) = forward(denoiser, [row])
    for full_blocks in range(denoiser.num_pages + 1):
        partial = primed(denoiser, row)
        assert partial.pages is not None
        partial.pages.near[: full_blocks * partial.pages.layout.block_bytes(48)] = 0x7F
        (output,) = forward(denoiser, [replace(partial, full_blocks=range(full_blocks))])
        assert torch.equal(output, exact[ACTIVE])


def test_priming_in_chunks_writes_the_same_bytes(case: Case, denoiser: Denoiser) -> None:
    """Also where a chunk ends between the two pages of one block."""
    assert denoiser.page_layout("int8").num_blocks == denoiser.num_pages == case.num_pages
    whole = prime_row(denoiser, make_row(denoiser, 0))
    prime(denoiser, whole)
    for cut in range(1, denoiser.num_pages):
        part = prime_row(denoiser, make_row(denoiser, 0))
        prime(denoiser, part, [cut])
        assert torch.equal(part.entry, whole.entry)


@torch.inference_mode()
def test_the_tables_of_all_rows_of_a_request_share_one_limit(
    denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, sigmas = make_row(denoiser, 0), torch.linspace(1, 0.1, 4)
    table = denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, sigmas, 1))
    assert table is not None
    monkeypatch.setattr("model_executor.models.transformer.denoiser.MODULATION_BYTES", table.nbytes)
    assert denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, sigmas, 1)) is not None
    assert denoiser.modulation(ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, sigmas, 2)) is None


@torch.inference_mode()
def test_the_last_table_is_kept_for_its_owner(denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    row, sigmas, made = make_row(denoiser, 0), torch.linspace(1, 0.1, 4), list[ModulationInputs]()
    make = denoiser._modulation_table
    monkeypatch.setattr(denoiser, "_modulation_table", lambda inputs: (made.append(inputs), make(inputs))[1])
    inputs = ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, sigmas, 1, cache_salt="me")
    others = [
        replace(inputs, cache_salt="you"),
        replace(inputs, cache_salt=None),
        replace(inputs, sigmas=sigmas / 2),
        replace(inputs, guidance_scale=0.5),
        replace(inputs, pooled_prompt_embeds=row.pooled_prompt_embeds + 1),
    ]
    for other in others:
        expected = make(inputs), make(other)
        denoiser.modulation(inputs)
        made.clear()
        again = denoiser.modulation(replace(inputs, sigmas=sigmas.clone()))
        assert not made
        assert again is not None
        assert torch.equal(again, expected[0])
        changed = denoiser.modulation(other)
        assert made == [other]
        assert changed is not None
        assert torch.equal(changed, expected[1])
    sigmas *= 0.5  # another run's, in the same memory
    made.clear()
    denoiser.modulation(inputs)
    assert made == [inputs]


@torch.inference_mode()
def test_on_a_gpu_no_table_is_kept(denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing its inputs would wait for the GPU."""
    row, made = make_row(denoiser, 0), list[ModulationInputs]()
    monkeypatch.setattr(denoiser, "_device", torch.device("cuda"))
    monkeypatch.setattr(denoiser, "_modulation_table", made.append)
    inputs = ModulationInputs(row.pooled_prompt_embeds, 1.0, torch.linspace(1, 0.1, 4), 1, cache_salt="me")
    for _ in range(2):
        denoiser.modulation(inputs)
    assert made == [inputs, inputs]
