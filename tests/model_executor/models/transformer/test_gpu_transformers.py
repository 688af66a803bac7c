"""Every family's denoiser on a GPU's operators, with interpreted kernels, against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_denoisers import CASES, SETS, forward, make_row, prime, prime_row, put_adapters
from thread_groups import ThreadGroups
from torch import Tensor

from core.page_scheme import PageDtype
from model_executor.kernels.gpu_attention import attend_alike, attend_each
from model_executor.kernels.gpu_operators import GpuOperators, TritonOperators
from model_executor.kernels.gpu_pages import page_table
from model_executor.kernels.held import holding
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.page_cache.pages import PageEntry, Pages, PageTable

pytest.importorskip("triton")  # interpreted: see conftest.py

Model = tuple[Denoiser, Denoiser]
"""A denoiser on Triton's operators, and it on PyTorch's."""

EVERY = [
    "flux-dev",
    "flux-kontext",
    "klein",
    "sd3",
    "second-attention-last",
    "qwen-edit",
    "qwen-edit-2511",
    "z-image",
    "dit",
]
SOME = ["flux-dev", "klein", "second-attention-last", "z-image"]
PRIMED = [*SOME, "qwen-edit-2511"]
SIZES = [((2, 3), 2), ((1, 2), 1)]
"""(grid, text tokens) of requests that share a batch."""

ACTIVE = torch.tensor([1, 2, 5])


@cache
def model(name: str) -> Model:
    return make_model(name)


def make_model(name: str) -> Model:
    from model_executor.kernels import triton_kernels

    case = CASES[name]
    torch.manual_seed(0)
    theirs = case.denoiser(case.module().eval(), 1000, GpuOperators())
    # The one pads queries, the other does not.
    attend = attend_each if name in ("sd3", "qwen-edit", "z-image") else attend_alike
    return theirs.computing_with(TritonOperators(triton_kernels).attending(attend)), theirs


def exact(denoiser: Denoiser, seed: int) -> Row:
    return make_row(denoiser, seed, *SIZES[seed % 2])


def edit(denoiser: Denoiser, seed: int, active: Tensor = ACTIVE, dtype: PageDtype = "int8", **options: Any) -> Row:
    """A row over random pages of two keyframes."""
    row, layout = make_row(denoiser, seed, *SIZES[0]), denoiser.page_layout(dtype)
    number = denoiser.rows_per_token * len(row.latents)
    entries = [torch.zeros(layout.entry_bytes(len(row.latents)), dtype=torch.uint8) for _ in range(2)]
    for entry, block in product(entries, range(layout.num_blocks)):
        keys_values = torch.randn(2, layout.num_heads, number, layout.head_dim)
        PageEntry(entry, layout, len(row.latents)).write(block, keys_values)
    return replace(row, active=active, pages=Pages(layout, len(row.latents), *entries, 0.3), **options)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_requests_of_every_kind_in_one_batch(name: str) -> None:
    """Exact, mask-aware, and with a block in full; of two sizes."""
    ours, theirs = model(name)
    rows = [edit(theirs, 1), exact(theirs, 3), edit(theirs, 4, ACTIVE[1:], full_blocks=range(1))]
    assert_close(forward(ours, rows), forward(theirs, rows))


def test_requests_with_patches() -> None:
    """Beside one without."""
    ours, theirs = make_model("flux-dev")
    put_adapters(theirs)  # of the groups of layers, which both have
    rows = [edit(theirs, 1, patches=SETS[1]), exact(theirs, 3), edit(theirs, 4, patches=SETS[2])]
    alone = forward(theirs, [replace(rows[0], patches=())])[0]
    outputs = forward(theirs, rows)
    assert not torch.allclose(outputs[0], alone, atol=1e-2)
    assert_close(forward(ours, rows), outputs)


@dataclass(frozen=True)
class InTurn:
    """A kernel whose launches take turns: the interpreter runs in one thread at a time."""

    kernel: Any
    lock: Lock

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            with self.lock:
                self.kernel[grid](*args, **constants)

        return launch


@torch.inference_mode()
def test_ranks_that_compute_together() -> None:
    """Each attends for one of the heads, without the kernel that prepares those of all."""
    from model_executor.kernels import triton_kernels

    lock, launched = Lock(), vars(triton_kernels).items()
    kernels: Any = SimpleNamespace(
        **{name: InTurn(each, lock) for name, each in launched if hasattr(each, "arg_names")}
    )
    _, theirs = model("flux-dev")
    ours = theirs.computing_with(TritonOperators(kernels))
    rows = [edit(theirs, 1), exact(theirs, 3)]
    expected = theirs.forward(rows)
    for outputs in ThreadGroups(2).run(lambda group: ours.forward(rows, group), range(2)):
        assert_close(outputs, expected)


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["float32", "int8"]])
def test_pages_of_other_dtypes(dtypes: Sequence[PageDtype]) -> None:
    """Of one in a batch, or of several."""
    ours, theirs = model("flux-dev")
    rows = [edit(theirs, seed, dtype=dtype) for seed, dtype in enumerate(dtypes)]
    assert_close(forward(ours, rows), forward(theirs, rows))


@pytest.mark.parametrize("name", PRIMED)
def test_templates_are_primed(name: str) -> None:
    denoisers = model(name)
    made, expected = (prime_row(denoiser, exact(denoiser, 0)) for denoiser in denoisers)
    prime(denoisers[0], made, [1])
    prime(denoisers[1], expected, [1])
    torch.testing.assert_close(made.entry.view(torch.float32), expected.entry.view(torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SOME)
@torch.inference_mode()
def test_a_table_is_read_instead_of_the_pages(name: str) -> None:
    """Its contents are those that it has when kernels run; of a batch some rows may have one. What has weight 0 is not
    read, whatever its address."""
    ours, theirs = model(name)
    rows = [edit(theirs, 3), edit(theirs, 4, ACTIVE[1:])]
    pages = [row.pages for row in rows]
    assert pages[0] is not None
    assert pages[0].far is not None
    assert pages[1] is not None
    nothing = torch.zeros_like(pages[0].near)
    table = PageTable(torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    tabled = replace(rows[0], pages=replace(pages[0], near=nothing, far=nothing, table=table))
    near, far = pages[0].near.data_ptr(), pages[0].far.data_ptr()
    contents = [
        ((near, far), (0.7, 0.3), pages[0]),
        ((far, 8), (1.0, 0.0), replace(pages[0], near=pages[0].far, far=None)),
    ]
    for others, (addresses, weights, same) in zip(([], [rows[1]]), contents, strict=True):
        table.addresses.copy_(torch.tensor(addresses))
        table.weights.copy_(torch.tensor(weights))
        expected = theirs.forward([replace(rows[0], pages=same), *others])
        assert_close(ours.forward([tabled, *others]), expected)


@pytest.mark.parametrize("name", ["flux-dev", "klein", "z-image"])
@torch.inference_mode()
def test_of_repeated_tokens_the_first_counts(name: str) -> None:
    """As a step that is replayed with other masks repeats the last token, even to as many as the picture has."""
    ours, theirs = model(name)
    row = edit(theirs, 3)
    assert row.pages is not None
    (expected,) = theirs.forward([row])
    table = page_table([row.pages], torch.device("cpu"))
    tabled = replace(row, pages=replace(row.pages, table=PageTable(table.addresses[0], table.weights[0])))
    for number in (1, 3):
        padded = torch.cat([ACTIVE, ACTIVE[-1:].expand(number)])
        output = ours.forward([replace(tabled, active=padded)])[0]
        assert_close([output[: len(ACTIVE)]], [expected])


def test_each_block_is_waited_for() -> None:
    asked = list[int]()
    ours, theirs = model("flux-dev")
    row = edit(theirs, 3, full_blocks=range(1))
    assert row.pages is not None
    (expected,) = forward(theirs, [row])
    assert_close(forward(ours, [replace(row, pages=replace(row.pages, wait=asked.append))]), [expected])
    assert asked == list(range(1, theirs.num_pages))


def test_a_pass_holds_what_it_reads_from_caches() -> None:
    """The rotary table, and index tables, also in later steps, which find all of them in the caches."""
    ours, theirs = model("flux-dev")
    row = edit(theirs, 3)
    forward(ours, [row])
    held = list[Tensor]()
    with holding(held):
        forward(ours, [row])
    addresses = {x.data_ptr() for x in held}
    assert ours._rotary_table(len(row.prompt_embeds), (row.grid,)).data_ptr() in addresses
    assert len(addresses) >= 4
