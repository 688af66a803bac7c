"""A GPU's operators on a machine without one: on the CPU where PyTorch's operators can run there, and on the meta
device, whose tensors have shapes but no content. A pass that mixes devices, or waits for a value on the host, fails
there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import model_executor.kernels
from core.errors import ConfigError
from model_executor.kernels import gpu_attention, gpu_operators, gpu_tables
from model_executor.kernels.gpu_attention import ROWS, Together, attend_alike, attend_each, best_attend, varlen_attend
from model_executor.kernels.gpu_operators import GpuOperators, TritonOperators
from model_executor.kernels.gpu_tables import offsets, places, table
from model_executor.kernels.linear import fused_linear, gpu_linear, plain_linear
from model_executor.kernels.linear_groups import ProductGroup
from model_executor.kernels.operators import Operators, chosen_operators
from model_executor.kernels.ragged import spans
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import PageEntry, Pages
from tools.random_unet_checkpoints import sd_unet, sdxl_unet

META = torch.device("meta")
GRID, TEXT, WIDTH = (3, 4), 2, 16
TOKENS = GRID[0] * GRID[1]
ACTIVE = torch.tensor([1, 5, 6, 11])
CORNER = torch.tensor([0])


def torch_operators() -> Operators:
    """Operators without Triton."""
    return GpuOperators()


def triton_operators() -> Operators:
    """Operators with Triton, interpreted: see conftest.py."""
    pytest.importorskip("triton")
    operators = gpu_operators.gpu_operators(torch.device("cpu"))
    assert isinstance(operators, TritonOperators)  # PyTorch's take their place where they do not work
    return operators


def make_flux() -> Any:
    return FluxTransformer2DModel(
        in_channels=2 * WIDTH,
        out_channels=WIDTH,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def make_sd3() -> Any:
    """A denoiser with a second attention in its first block."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=WIDTH // 4,
        out_channels=WIDTH // 4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


MODELS = [(make_flux, FluxTransformer), (make_sd3, SD3Transformer)]
Model = tuple[Callable[[], Any], Callable[..., Denoiser]]


def make_denoiser(model: Model, device: torch.device, dtype: torch.dtype, operators: Operators) -> Denoiser:
    torch.manual_seed(0)
    module = model[0]().to(device, dtype).eval().requires_grad_(False)
    return model[1](module, 1000, operators)


def make_row(denoiser: Denoiser, seed: int, device: torch.device, dtype: torch.dtype) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return Row(
        latents=draw(TOKENS, WIDTH),
        condition=draw(TOKENS, WIDTH if isinstance(denoiser, FluxTransformer) else 0),
        prompt_embeds=draw(TEXT + seed, 32),
        pooled_prompt_embeds=draw(32),
        sigma=torch.tensor(0.6).to(device),
        guidance_scale=3.5,
        grid=GRID,
    )


def primed(denoiser: Denoiser, row: Row) -> Pages:
    """The row over its own pages: one keyframe made in two chunks, and one at once."""
    layout = denoiser.page_layout("float32")
    entry = torch.empty(layout.entry_bytes(TOKENS), dtype=torch.uint8, device=row.latents.device)
    shared = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
    template = PrimeRow(**{name: getattr(row, name) for name in shared}, hidden=None, entry=entry)
    (hidden,) = denoiser.prime([template], (0, 2))
    denoiser.prime([replace(template, hidden=hidden)], (2, denoiser.num_pages))
    return Pages(layout, TOKENS, entry, entry, 0.3)


# ------------------------------------------------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize("make_operators", [torch_operators, triton_operators])
@pytest.mark.parametrize("model", MODELS, ids=["flux", "sd3"])
@torch.inference_mode()
def test_a_batch_on_gpu_operators_equals_each_request_alone_on_the_cpus(
    model: Model, make_operators: Callable[[], Operators]
) -> None:
    """Requests of several text lengths: all tokens, some, some after a block in full."""
    ours = make_denoiser(model, torch.device("cpu"), torch.float32, make_operators())
    theirs = make_denoiser(model, torch.device("cpu"), torch.float32, Operators(plain_linear))
    rows = [make_row(ours, seed, torch.device("cpu"), torch.float32) for seed in range(3)]
    pages = [primed(theirs, row) for row in rows]
    for row, expected in zip(rows, pages, strict=True):
        torch.testing.assert_close(
            primed(ours, row).near.view(torch.float32), expected.near.view(torch.float32), rtol=1e-4, atol=1e-4
        )
    edits = [
        replace(rows[0], active=ACTIVE, pages=pages[0]),
        rows[1],
        replace(rows[2], active=ACTIVE[1:], pages=pages[2], full_blocks=range(2)),
    ]
    for batch in (edits, rows):
        for output, row in zip(ours.forward(batch), batch, strict=True):
            torch.testing.assert_close(output, theirs.forward([row])[0], rtol=1e-4, atol=1e-4)


def test_where_all_tokens_are_computed_nothing_is_copied() -> None:
    qkv = torch.randn(12, 3, 2, 16)
    attention = Together([(2, 3), (3, 4)], 2, 16, qkv, attend_each)
    attention(0, 0, qkv, ((0, 5), (5, 12)), [Unused(), Unused()])
    assert "_joint" not in vars(attention)


class Unused:
    """A page source from which nothing may be loaded."""

    is_in_order = True

    def load(self, *_: object) -> None:
        raise AssertionError

    def store(self, page: int, image: Tensor) -> None:
        """The page store of an edit."""


def test_tables_of_rows() -> None:
    rows, requests = table(((2, 4), (7, 8)), torch.device("cpu"))
    assert (rows.tolist(), requests.tolist()) == ([2, 3, 7], [0, 0, 1])
    assert offsets(((0, 4), (4, 9)), torch.device("cpu")).tolist() == [0, 4, 9]
    assert places(torch.tensor([1, 3]), 5).tolist() == [-1, 0, -1, 1, -1]
    assert all(t.dtype == torch.int32 for t in (rows, requests, places(torch.tensor([1]), 2)))


def test_tables_are_made_on_the_host_whatever_device_is_the_default() -> None:
    with torch.device("meta"):
        assert {
            t.device.type for t in (*table(((2, 5),), torch.device("cpu")), offsets(((0, 5),), torch.device("cpu")))
        } == {"cpu"}


@pytest.mark.parametrize(
    ("queries", "keys"),
    [([5], [9]), ([128], [200]), ([128, 128], [30, 30]), ([100, 120, 300], [50, 50, 50]), ([1, 2], [7, 8])],
)
def test_similar_requests_share_a_call_of_attention(
    monkeypatch: pytest.MonkeyPatch, queries: Sequence[int], keys: Sequence[int]
) -> None:
    """Neighbours with equal numbers of keys, and of queries up to the same multiple of ROWS, share one call."""
    query, joint = torch.randn(sum(queries), 3, 2, 16)[:, 0], torch.randn(sum(keys), 2, 2, 16)
    inputs = query, joint[:, 0], joint[:, 1], spans(queries), spans(keys)
    expected, calls = attend_each(*inputs), list[tuple[int, ...]]()
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *kv: calls.append(q.shape) or attend(q, *kv)
    )
    torch.testing.assert_close(attend_alike(*inputs), expected)
    shapes = {(-(-number // ROWS) * ROWS, count) for number, count in zip(queries, keys, strict=True)}
    assert len(calls) == len(shapes)
    assert {(shape[0], shape[2]) for shape in calls} == {
        (sum(-(-n // ROWS) * ROWS == rows and k == count for n, k in zip(queries, keys, strict=True)), rows)
        for rows, count in shapes
    }


@pytest.mark.parametrize(
    ("capability", "cudnn", "flash", "chosen"),
    [
        ((9, 0), 91900, None, attend_alike),
        ((9, 0), 91900, "FA3", varlen_attend),
        ((9, 0), 90100, None, varlen_attend),
        ((9, 0), None, None, varlen_attend),
        ((8, 9), 91900, None, varlen_attend),
        ((7, 5), 91900, None, attend_each),
    ],
)
def test_attention_uses_pytorchs_preferred_implementation(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cudnn: int | None,
    flash: str | None,
    chosen: gpu_attention.Attend,
) -> None:
    monkeypatch.setattr(gpu_attention, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: flash)
    half: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert best_attend(half, 128) is chosen
    assert best_attend(torch.empty(1), 128) is attend_each


def test_merged_layers_equal_the_single_ones() -> None:
    """Each layer still works by itself, and no weight is stored twice."""
    layers, x = [torch.nn.Linear(8, n, bias=n != 4) for n in (3, 4, 5)], torch.randn(6, 8)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    group = ProductGroup(layers, gpu_linear)
    torch.testing.assert_close(group(x), expected)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), expected)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1


def test_linear_with_activation() -> None:
    """On a CPU this operator computes exact GELU, not its tanh approximation: they differ by at most 5e-4."""
    layer, x = torch.nn.Linear(8, 5), torch.randn(6, 8)
    torch.testing.assert_close(gpu_linear(layer, x), layer(x))
    torch.testing.assert_close(gpu_linear(layer, x, gelu=True), plain_linear(layer, x, gelu=True), rtol=0, atol=1e-3)
    bare = torch.nn.Linear(8, 5, bias=False)
    torch.testing.assert_close(gpu_linear(bare, x, gelu=True), plain_linear(bare, x, gelu=True))


def make_unet(make: Callable[..., Any], device: torch.device, dtype: torch.dtype, operators: Operators) -> Unet:
    torch.manual_seed(0)
    return Unet(make(9, WIDTH).to(device, dtype).eval().requires_grad_(False), 1000, 32, operators)


def unet_row(unet: Unet, seed: int, device: torch.device, dtype: torch.dtype) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return Row(
        latents=draw(TOKENS, 64),
        condition=draw(TOKENS, 80),
        prompt_embeds=draw(7, unet.module.config.cross_attention_dim),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(0.6).to(device),
        guidance_scale=1.0,
        grid=GRID,
    )


def unet_pages(unet: Unet, rows: Sequence[Row]) -> list[Tensor]:
    """Entries of int8 pages of templates that are primed together in two chunks."""
    layout = unet.page_layout("int8")
    entries = [torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8, device=row.latents.device) for row in rows]
    shared = [{f.name: getattr(row, f.name) for f in fields(Row)[:8]} for row in rows]
    templates = [PrimeRow(**s, hidden=None, entry=entry) for s, entry in zip(shared, entries, strict=True)]
    hidden = unet.prime(templates, (0, 3))
    again = [replace(template, hidden=parts) for template, parts in zip(templates, hidden, strict=True)]
    assert unet.prime(again, (3, layout.num_blocks)) == [(), ()]
    return entries


@pytest.mark.parametrize("make_operators", [torch_operators, triton_operators])
@pytest.mark.parametrize("make", [sd_unet, sdxl_unet])
@torch.inference_mode()
def test_rows_that_share_a_unets_pass_equal_each_alone(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], make_operators: Callable[[], Operators]
) -> None:
    """Templates of one size: the two rows of a guided, masked request beside another request's. Without a UNet's own
    kernels, for which see test_unet_fused.py."""
    monkeypatch.setattr(gpu_operators, "_unet_operators", lambda device: None)
    cpu = torch.device("cpu")
    ours = make_unet(make, cpu, torch.float32, make_operators())
    theirs = make_unet(make, cpu, torch.float32, Operators(plain_linear))
    ours._is_shared = True
    rows, layout = [unet_row(ours, seed, cpu, torch.float32) for seed in range(3)], ours.page_layout("int8")
    entries = unet_pages(theirs, rows[:2])
    for made, expected in zip(unet_pages(ours, rows[:2]), entries, strict=True):
        values = (PageEntry(entry, layout, TOKENS).values for entry in (made, expected))
        assert all((a.int() - b.int()).abs().max() <= 1 for a, b in zip(*values, strict=True))
    pages = Pages(layout, TOKENS, *entries, 0.3)
    edit = replace(rows[0], active=ACTIVE, pages=pages)
    guided = [edit, replace(edit, prompt_embeds=rows[1].prompt_embeds)]
    corner = replace(edit, active=CORNER)  # its convolutions are not whole
    batch = [guided[0], rows[2], corner, replace(rows[1], active=ACTIVE[1:], pages=pages), guided[1]]
    for output, row in zip(ours.forward(batch), batch, strict=True):
        torch.testing.assert_close(output, theirs.forward([row])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # see `make test-slow`
@pytest.mark.parametrize("make", [sd_unet, sdxl_unet])
@torch.inference_mode()
def test_compiled_layers_equal_uncompiled_ones(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Traced, and run without generating code. Another mask compiles nothing new once there was a box that is not
    square. All blocks have the same width: each other one would be traced again, which takes seconds.
    """
    make = partial(make, block_out_channels=(16, 16, 16))
    torch.compiler.reset()
    counters, cpu = CompileCounter(), torch.device("cpu")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counters))
    theirs = make_unet(make, cpu, torch.float32, Operators(plain_linear))
    ours = make_unet(make, cpu, torch.float32, Operators(plain_linear).compiling())
    row = unet_row(ours, 0, cpu, torch.float32)
    pages = Pages(ours.page_layout("int8"), TOKENS, *unet_pages(theirs, [row, row]), 0.3)
    masks = (ACTIVE, CORNER, CORNER + 1, CORNER + 4, ACTIVE[1:], torch.arange(2, 10))
    edits = [replace(row, active=active, pages=pages) for active in masks]
    torch.testing.assert_close(ours.forward([row])[0], theirs.forward([row])[0], rtol=1e-4, atol=1e-4)
    for edit in edits[:3]:
        ours.forward([edit])
    compiled = counters.frame_count
    for edit in edits:
        torch.testing.assert_close(ours.forward([edit])[0], theirs.forward([edit])[0], rtol=1e-4, atol=1e-4)
    assert counters.frame_count == compiled > 0


# --------------------------------------------------------------------------------------------------------- without data


class NoTransfers(TorchDispatchMode):
    """Refuses copies between host and device: on a GPU they would wait for all queued work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == META:
            assert args[0].device == META, "a tensor goes from host to device in the middle of a pass"
        return func(*args, **kwargs)


@pytest.mark.parametrize("attend", [attend_each, attend_alike, varlen_attend])
@pytest.mark.parametrize("model", MODELS, ids=["flux", "sd3"])
@torch.inference_mode()
def test_a_transformers_pass_neither_mixes_devices_nor_waits(
    monkeypatch: pytest.MonkeyPatch, model: Model, attend: gpu_attention.Attend
) -> None:
    monkeypatch.setattr(gpu_tables, "upload", lambda x, device: x.to(device))
    denoiser = make_denoiser(model, META, torch.bfloat16, GpuOperators().attending(attend))
    rows = [make_row(denoiser, seed, META, torch.bfloat16) for seed in range(2)]
    pages, active = primed(denoiser, rows[0]), ACTIVE.to(META)
    modulation = denoiser.modulation(ModulationInputs(rows[1].pooled_prompt_embeds, 3.5, torch.ones(5, device=META), 1))
    assert modulation is not None
    for full_blocks in (0, 1, denoiser.num_pages):
        edit = replace(rows[0], active=active, pages=pages, full_blocks=range(full_blocks))
        batch = [edit, replace(rows[1], modulation=modulation[:1])]
        denoiser.forward(batch)  # tables that are kept from step to step
        with NoTransfers():
            outputs = denoiser.forward(batch)
        assert [output.shape for output in outputs] == [(len(ACTIVE), WIDTH), (TOKENS, WIDTH)]
        assert all(output.device == META and output.dtype == torch.bfloat16 for output in outputs)
    denoiser.forward([replace(rows[1], modulation=modulation[:1])])


@pytest.mark.parametrize("make", [sd_unet, sdxl_unet])
@torch.inference_mode()
def test_a_unets_pass_neither_mixes_devices_nor_waits(make: Callable[..., Any]) -> None:
    unet = make_unet(make, META, torch.bfloat16, GpuOperators())
    row, layout = unet_row(unet, 0, META, torch.bfloat16), unet.page_layout("int8")
    entries = unet_pages(unet, [row, row])
    edit = replace(row, active=ACTIVE.to(META), box=(1, 0, 4, 3), pages=Pages(layout, TOKENS, *entries, 0.3))
    corner = replace(edit, active=CORNER.to(META), box=(0, 0, 1, 1))  # convolutions of the one are whole, of this not
    unet.forward([edit, corner])
    with NoTransfers():
        outputs = unet.forward([edit, row, edit, corner])
    numbers = [len(ACTIVE), TOKENS, len(ACTIVE), len(CORNER)]
    assert [output.shape for output in outputs] == [(number, 64) for number in numbers]


# -------------------------------------------------------------------------------------------------------------- choice


class Broken:
    """Kernels on a machine without a C compiler."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Failed to find C compiler")


class Wrong:
    """Kernels that change nothing."""

    def __getattr__(self, name: str) -> Any:
        class Launcher(dict[Any, Any]):
            def __missing__(self, grid: Any) -> Any:
                return lambda *args, **constants: None

        return Launcher()


@pytest.mark.parametrize(("kernels", "cause"), [(Broken, "C compiler"), (Wrong, "compute wrongly on cpu")])
def test_without_kernels_that_work_pytorch_computes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: Callable[[], Any], cause: str
) -> None:
    monkeypatch.setitem(sys.modules, "model_executor.kernels.triton_kernels", kernels())
    monkeypatch.setattr(model_executor.kernels, "triton_kernels", kernels(), raising=False)
    chosen = gpu_operators.gpu_operators.__wrapped__(torch.device("cpu"))
    assert type(chosen) is GpuOperators
    assert cause in caplog.text


KERNELS = [
    *("add_gated", "add_norm", "add_normed", "attention_inputs", "find_places", "normalise_and_rotate"),
    *("quantise", "read_page", "swiglu", "take_rows"),
]


class SignallingMemory(TorchDispatchMode):
    """Fills new float32 tensors without content with the worst that may lie in that memory: signalling NaN, at which
    numpy, and so Triton's interpreter, warns. Those of int32, which are indices, with zeros.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "empty" in func.name() and output.dtype == torch.float32:
            output.view(torch.int32).fill_(0x7F800001)
        if "empty" in func.name() and output.dtype == torch.int32:
            output.zero_()
        return output


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("fault", ["does nothing", "does not compile"])
def test_each_kernel_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, fault: str
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.errors import PTXASError

    from model_executor.kernels import triton_kernels

    def launch(*args: Any, **constants: Any) -> None:
        if fault == "does not compile":
            raise PTXASError("ptxas: no such instruction")

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return launch

    monkeypatch.setattr(triton_kernels, name, Launcher())
    with SignallingMemory(), np.errstate(invalid="ignore"):  # a GPU computes with NaN in silence
        assert type(gpu_operators.gpu_operators.__wrapped__(torch.device("cpu"))) is GpuOperators
    assert ("ptxas" if fault == "does not compile" else "compute wrongly") in caplog.text


def test_the_users_choice() -> None:
    """PyTorch's operators round as diffusers does; pages made with them have keys of their own."""
    plain = chosen_operators("torch", torch.device("cpu"))
    assert (plain.linear, plain.kernels) == (plain_linear, None)
    assert plain.digest != chosen_operators("auto", torch.device("cpu")).digest
    with pytest.raises(ConfigError, match="--kernels compile needs a GPU"):
        chosen_operators("compile", torch.device("cpu"))


def test_the_digest_depends_on_kernels_plain_layers_and_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = SimpleNamespace(digest="0123")
    assert Operators(plain_linear).digest == "plain"
    assert Operators(plain_linear, kernels).digest == "plain 0123"
    assert Operators(fused_linear, kernels).compiling().digest == "0123 compiled"
    assert GpuOperators().digest == ""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert GpuOperators().digest == "FA3"
