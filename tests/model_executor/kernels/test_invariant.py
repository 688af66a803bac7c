"""`--batch-invariant`: a row's bits alone and in company. Kernels are interpreted on a CPU; for a GPU's own products
see `test_invariant_on_gpu.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from interpreted_products import repair_products
from thread_groups import ThreadGroups
from torch import Tensor, nn

from core.config import ModelConfig
from core.errors import ConfigError
from core.page_scheme import PageLayout
from model_executor.kernels import gpu_operators
from model_executor.kernels.attention import KeysValues, head_major
from model_executor.kernels.gpu_operators import GpuOperators, invariant_operators
from model_executor.kernels.linear_groups import ProductGroup
from model_executor.kernels.low_rank import LowRank, Segment
from model_executor.kernels.operators import Operators, chosen_operators
from model_executor.kernels.ragged import spans
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.qwen_transformer import QwenTransformer
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.own_pages import OwnPages
from model_executor.page_cache.pages import PageEntry, Pages
from tools.random_unet_checkpoints import sdxl_unet

pytest.importorskip("triton")  # interpreted: see conftest.py

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""One unit in the last place, since the interpreter rounds to bfloat16 towards zero; in float32 of sums."""


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    repair_products(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.fixture
def operators() -> Operators:
    return invariant_operators.__wrapped__(CPU)


def assert_near(actual: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "columns"), [(36, 50), (128, 130)])
def test_a_rows_product_in_any_company(operators: Operators, dtype: torch.dtype, width: int, columns: int) -> None:
    """Alone, among 7 others, as rows of other tiles, in another order, as rows that lie apart."""
    layer = nn.Linear(width, columns, dtype=dtype)
    x = torch.randn(300, width).to(dtype)
    for gelu in (False, True):
        whole = operators.linear(layer, x, gelu=gelu)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert_near(whole, F.gelu(exact, approximate="tanh") if gelu else exact)
    for number in (0, 130, 299):
        assert torch.equal(operators.linear(layer, x[number : number + 1], gelu=True), whole[number : number + 1])
    for rows in (range(8), range(127, 130), range(299, -1, -1), range(5, 300, 37)):
        assert torch.equal(operators.linear(layer, x[list(rows)], gelu=True), whole[list(rows)])
    apart = torch.zeros(9, width + 3, dtype=dtype)
    apart[:, 1 : width + 1] = x[:9]
    assert torch.equal(operators.linear(layer, apart[:, 1 : width + 1], gelu=True), whole[:9])
    assert operators.linear(layer, x[:0]).shape == (0, columns)


def test_a_product_without_bias(operators: Operators) -> None:
    layer, x = nn.Linear(70, 9, bias=False), torch.randn(3, 70)
    assert_near(operators.linear(layer, x), layer(x))


def test_layers_that_share_an_input_and_additions_for_some_rows(operators: Operators) -> None:
    """Rows with a patch and rows without, alone and side by side, with and without GELU."""
    group = ProductGroup([nn.Linear(48, 24), nn.Linear(48, 40)], operators.linear)
    group.put("a", group.addition([LowRank(torch.randn(4, 48), torch.randn(24, 4)), None]))
    x, scale = torch.randn(12, 48), torch.rand(5)
    where = (Segment("a", (4, 9), scale),)
    assert len(group._layers) == 1, "they are one product"
    for gelu in (False, True):
        whole = group(x, where, gelu=gelu)
        for number in range(12):
            row, is_patched = slice(number, number + 1), 4 <= number < 9
            alone = (Segment("a", (0, 1), scale[number - 4 : number - 3]),) if is_patched else ()
            assert torch.equal(group(x[row], alone, gelu=gelu), whole[row])


def test_quantised_layers_are_refused(operators: Operators) -> None:
    class Quantised(nn.Linear):
        """As packages that quantise make them."""

    with pytest.raises(ConfigError, match="not quantised"):
        operators.linear(Quantised(8, 8), torch.randn(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_norm(operators: Operators, dtype: torch.dtype) -> None:
    norm, x = RMSNorm(200, 1e-6).to(dtype), torch.randn(20, 200).to(dtype)
    norm.weight.copy_(torch.randn(200))
    whole = operators.rms_norm(norm, x)
    assert_near(whole, F.rms_norm(x.double(), [200], norm.weight.double(), 1e-6))
    assert torch.equal(operators.rms_norm(norm, x[7:8]), whole[7:8])


# ------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [72, 136])
def test_a_requests_attention_in_any_company(operators: Operators, dtype: torch.dtype, head_dim: int) -> None:
    """Alone; with fewer queries, in another order; a head alone: against the batch, and the batch against float64."""
    attend = choice(operators)
    query, joint = torch.randn(150, 3, 3, head_dim).to(dtype)[:, 0], torch.randn(170, 2, 3, head_dim).to(dtype)
    where, keys = spans([1, 139, 10]), spans([65, 31, 74])
    whole = attend(query, joint[:, 0], joint[:, 1], where, keys)
    for (start, stop), (first, last) in zip(where, keys, strict=True):
        q, k, v = query[start:stop], joint[first:last, 0], joint[first:last, 1]
        wide_q, wide_k, wide_v = (x.double().transpose(0, 1) for x in (q, k, v))
        exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v)
        assert_near(whole[start:stop], exact.transpose(0, 1).flatten(1))
        own = [(0, last - first)]
        assert torch.equal(attend(q, k, v, [(0, stop - start)], own), whole[start:stop])
        order = torch.arange(stop - 1, start - 1, -3)
        assert torch.equal(attend(query[order], k, v, [(0, len(order))], own), whole[order])
        alone = attend(q[:, 1:2].contiguous(), k[:, 1:2], v[:, 1:2].contiguous(), [(0, stop - start)], own)
        assert torch.equal(alone, whole[start:stop, head_dim : 2 * head_dim])


def test_scores_of_any_size_are_attended_to(operators: Operators) -> None:
    """The running maximum keeps the largest weight at 1."""
    query = 1e3 * torch.randn(5, 1, 16)
    attended = choice(operators)(query, query, query, [(0, 5)], [(0, 5)])
    assert_near(attended, query.flatten(1))


def choice(operators: Operators) -> Any:
    assert isinstance(operators, GpuOperators)
    return operators._choose(torch.empty(1), 16)


# ---------------------------------------------------------------------------------------------------------------- pages


def test_a_share_of_the_heads_is_made_and_read_with_the_bits_of_all(operators: Operators) -> None:
    layout = PageLayout(num_blocks=2, num_heads=3, head_dim=64, dtype="int8")
    whole, part, waited = torch.zeros(2, layout.entry_bytes(9), dtype=torch.uint8), None, list[int]()
    part = torch.zeros_like(whole)
    for number in range(2):
        x = torch.randn(2, 3, 9, 64)
        PageEntry(whole[number], layout, 9, operators.quantise).write(1, x)
        for heads in ((0, 1), (1, 3)):
            PageEntry(part[number], layout, 9, operators.quantise).of_heads(heads).write(1, x[:, slice(*heads)])
    assert torch.equal(part, whole)
    pages, fresh, rows = Pages(layout, 9, whole[0], whole[1], 0.3), torch.randn(4, 2, 3, 64), torch.tensor([0, 1, 4, 7])
    expected = KeysValues(head_major(torch.zeros(11, 2, 3, 64)), 2)
    operators.open(pages).read_over(1, expected, fresh, rows)
    ours = KeysValues(head_major(torch.zeros(11, 2, 2, 64)), 2)
    share = replace(pages, heads=(1, 3), wait=waited.append)
    operators.open(share).read_over(1, ours, fresh[:, :, 1:], rows)
    assert torch.equal(ours.joint, expected.joint[:, 1:])
    assert waited == [0, 1]
    assert operators.open(replace(pages, heads=(1, 1)))


# ------------------------------------------------------------------------------------------------------ whole denoisers

GRID, TOKENS, WIDTH = (2, 3), 6, 16
ACTIVE = torch.tensor([1, 3, 4])


def make_flux(operators: Operators) -> Denoiser:
    module = FluxTransformer2DModel(
        in_channels=2 * WIDTH,
        out_channels=WIDTH,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxTransformer(random(module), 1000, operators)


def make_qwen(operators: Operators) -> Denoiser:
    module = QwenImageTransformer2DModel(
        in_channels=2 * WIDTH,
        out_channels=WIDTH // 4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return QwenTransformer(random(module), 1000, operators)


def random(module: Any) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return module.eval().requires_grad_(False)


def make_row(seed: int, width: int, condition: int, text: int, tokens: int = TOKENS, grid: Any = GRID) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Row(
        latents=draw(tokens, width),
        condition=draw(tokens, condition),
        prompt_embeds=draw(3 + seed, text),
        pooled_prompt_embeds=draw(32),
        sigma=torch.tensor(0.3 + 0.1 * seed),
        guidance_scale=3.5,
        grid=grid,
    )


def primed(denoiser: Any, rows: Sequence[Row]) -> list[Pages]:
    """Each row over its own int8 pages, made together."""
    layout, tokens = denoiser.page_layout("int8"), len(rows[0].latents)
    entries = torch.zeros(len(rows), layout.entry_bytes(tokens), dtype=torch.uint8)
    shared = [{field.name: getattr(row, field.name) for field in fields(Row)[:8]} for row in rows]
    templates = [PrimeRow(**its, hidden=None, entry=entry) for its, entry in zip(shared, entries, strict=True)]
    denoiser.prime(templates, (0, layout.num_blocks))
    return [Pages(layout, tokens, entry, None, 0.0) for entry in entries]


def mixed_batch(denoiser: Any, rows: Sequence[Row]) -> list[Row]:
    """Masked, exact, masked after a block in full."""
    pages = primed(denoiser, rows[:2])
    (alone,) = primed(denoiser, rows[:1])
    assert torch.equal(alone.near, pages[0].near), "a template's pages depend on the other"
    first = replace(rows[0], active=ACTIVE, pages=pages[0])
    second = replace(rows[1], active=ACTIVE[1:], pages=pages[1], full_blocks=range(1))
    return [first, rows[2], second]


@pytest.mark.parametrize("make", [make_flux, make_qwen])
def test_a_transformers_rows_alone_and_in_a_mixed_batch(
    monkeypatch: pytest.MonkeyPatch, operators: Operators, make: Callable[[Operators], Denoiser]
) -> None:
    """Bit for bit, in another order; and near the results of other operators."""
    denoiser, plain = make(operators), make(GpuOperators())
    if make is make_qwen:
        monkeypatch.setattr(denoiser.module.txt_norm, "forward", None)  # PyTorch's, whose sums depend on the prompts
    latents = WIDTH if make is make_flux else 2 * WIDTH
    rows = [make_row(seed, latents, 2 * WIDTH - latents, 32) for seed in range(3)]
    batch = mixed_batch(denoiser, rows)
    alone = [denoiser.forward([row])[0] for row in batch]
    order = [2, 0, 1]
    for number, output in zip(order, denoiser.forward([batch[number] for number in order]), strict=True):
        assert torch.equal(output, alone[number])
    for output, theirs in zip(alone, plain.forward(batch), strict=True):
        torch.testing.assert_close(output, theirs, rtol=1e-3, atol=1e-3)


def test_a_transformers_rows_on_any_number_of_ranks(operators: Operators) -> None:
    """A later step of an edit that makes its own pages, which computes its full step first; an exact edit with more
    keys than are read at a time."""
    denoiser = make_flux(operators)
    rows, layout = [make_row(seed, WIDTH, WIDTH, 32) for seed in range(2)], denoiser.page_layout("int8")
    rows[1] = replace(rows[1], prompt_embeds=torch.randn(40, 32))

    def batch() -> list[Row]:
        """Each rank has the pages of its heads."""
        room = OwnPages.room(layout, TOKENS, CPU)
        own = OwnPages(layout, TOKENS, *room, 0, rows[0].latents, rows[0].sigma, None)
        return [replace(rows[0], own=own, active=ACTIVE, pages=own.pages)]

    one = denoiser.forward(batch()) + denoiser.forward(rows[1:])
    for outputs in ThreadGroups(2).run(
        lambda group: denoiser.forward(batch(), group) + denoiser.forward(rows[1:], group), (0, 1)
    ):
        assert all(torch.equal(output, expected) for output, expected in zip(outputs, one, strict=True))


def test_a_unets_rows_alone_and_in_a_mixed_batch(monkeypatch: pytest.MonkeyPatch, operators: Operators) -> None:
    """Each in a pass of its own. Guided ones, too: other ranks may have the other row of a request."""
    torch.manual_seed(0)
    unet = Unet(sdxl_unet(9, 16).eval().requires_grad_(False), 1000, 32, operators)
    text = unet.module.config.cross_attention_dim
    rows = [replace(make_row(seed, 64, 80, text), pooled_prompt_embeds=torch.randn(16)) for seed in range(3)]
    rows = [replace(row, prompt_embeds=rows[0].prompt_embeds + seed) for seed, row in enumerate(rows)]
    batch = mixed_batch(unet, rows)
    batch = [row for first in batch[:2] for row in (first, replace(first, prompt_embeds=rows[1].prompt_embeds))]
    alone, passes = [unet.forward([row])[0] for row in batch], list[int]()

    def counted(run: Callable[[Sequence[Row]], Sequence[Tensor]], rows: Sequence[Row]) -> Sequence[Tensor]:
        passes.append(len(rows))
        return run(rows)

    for name in ("_run", "_run_masked"):
        monkeypatch.setattr(unet, name, partial(counted, getattr(unet, name)))
    assert all(torch.equal(a, b) for a, b in zip(unet.forward(batch), alone, strict=True))
    assert passes == [1, 1, 1, 1]


# --------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("kernels", ["torch", "compile"])
def test_kernels_that_cannot_be_invariant_are_refused(kernels: Any) -> None:
    with pytest.raises(ConfigError, match=f"--kernels {kernels}.*give --kernels auto"):
        ModelConfig(batch_invariant=True, kernels=kernels)


def test_pages_have_keys_of_their_own(operators: Operators) -> None:
    """On a CPU nothing changes."""
    assert operators.digest != gpu_operators.gpu_operators(CPU).digest
    plain = chosen_operators("auto", CPU)
    chosen = chosen_operators("auto", CPU, batch_invariant=True)
    assert (type(chosen), chosen.digest) == (type(plain), plain.digest)


@pytest.mark.parametrize("name", ["product", "attend", "rms_norm"])
def test_without_kernels_that_work_a_server_does_not_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from model_executor.kernels import invariant_kernels

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: args[2 if name == "rms_norm" else 3].zero_()

    monkeypatch.setattr(invariant_kernels, name, Launcher())
    with pytest.raises(ConfigError, match=r"compute wrongly on cpu.*leave --batch-invariant out"):
        invariant_operators.__wrapped__(CPU)


def test_without_triton_a_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_operators, "gpu_operators", lambda device: GpuOperators())
    with pytest.raises(ConfigError, match=r"needs Triton.*C compiler"):
        invariant_operators.__wrapped__(CPU)


# ------------------------------------------------------------------------------------------------------------- compiled


def test_kernels_compile_for_a_gpu_and_fit_it(tmp_path: Path) -> None:
    """For an H100, without one: with tensor cores, and within its shared memory."""
    program = Path(__file__).with_name("compile_invariant_kernels.py")
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), "90"], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in compiled} == {"product", "attend", "rms_norm"}
    assert all(int(shared) <= 227 * 1024 for _, _, shared, _ in compiled)
    assert all(int(products) > 0 for name, dtype, _, products in compiled if name != "rms_norm" and dtype == "*bf16")
