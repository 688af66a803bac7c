"""UNets layer by layer: against diffusers' module, and with active tokens over a template's pages."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from core.patches import Patch
from model_executor.kernels.low_rank import LowRank
from model_executor.models.base import PrimeRow, Row
from model_executor.models.unet import unet as unet_module
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import Pages
from model_executor.patches.adapters import Adapter
from tools.random_unet_checkpoints import sd_unet, sdxl_unet

GRID = (3, 4)
NUM_TOKENS = GRID[0] * GRID[1]
ACTIVE = torch.tensor([1, 4, 5, 6, 11])
TEXT_TOKENS, WIDTH = 7, 24
MAKE = {"sd": sd_unet, "sdxl": sdxl_unet}


@pytest.fixture(scope="module", params=MAKE)
def unet(request: pytest.FixtureRequest) -> Unet:
    return make_unet(request.param)


def make_unet(name: str, dtype: torch.dtype = torch.float32) -> Unet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Unet(MAKE[name](9, WIDTH).to(dtype).eval().requires_grad_(False), 1000, 32)


def make_inputs(unet: Unet, seed: int, sigma: float = 0.5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    config: Any = unet.module.config
    return {
        "latents": draw(NUM_TOKENS, 64),
        "condition": draw(NUM_TOKENS, 80),
        "prompt_embeds": draw(TEXT_TOKENS, config.cross_attention_dim),
        "pooled_prompt_embeds": draw(WIDTH if config.addition_embed_type else 0),
        "sigma": torch.tensor(sigma),
        "guidance_scale": 1.0,
        "grid": GRID,
    }


def prime(unet: Unet, inputs: dict[str, Any], layout: PageLayout, stops: tuple[int, ...] = ()) -> Tensor:
    """The entry, made in chunks that end before these pages."""
    entry = torch.zeros(layout.entry_bytes(NUM_TOKENS), dtype=torch.uint8)
    start, hidden = 0, None
    for stop in (*stops, layout.num_blocks):
        (hidden,) = unet.prime([PrimeRow(**inputs, hidden=hidden, entry=entry)], (start, stop))
        start = stop
    assert hidden == ()
    return entry


def pages_of(unet: Unet, inputs: dict[str, Any], dtype: PageDtype = "float32") -> Pages:
    layout = unet.page_layout(dtype)
    return Pages(layout, NUM_TOKENS, prime(unet, inputs, layout), None, 0.0)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("int8", 0.05)])
def test_active_tokens_of_an_unchanged_template_equal_the_full_pass(
    unet: Unet, dtype: PageDtype, tolerance: float
) -> None:
    inputs = make_inputs(unet, 0)
    (whole,) = unet.forward([Row(**inputs)])
    (some,) = unet.forward([Row(**inputs, active=ACTIVE, pages=pages_of(unet, inputs, dtype))])
    assert whole.std() > 0.1
    assert (some - whole[ACTIVE]).abs().max() < tolerance * whole.std()


@torch.inference_mode()
def test_edits_differ_from_exact_by_the_cached_tokens(unet: Unet) -> None:
    """With other latents under the mask, the blocks' other tokens stay the template's, so the result is close to exact,
    not equal.
    """
    inputs, other = make_inputs(unet, 0), make_inputs(unet, 1)
    edit = inputs | {"latents": inputs["latents"].index_copy(0, ACTIVE, other["latents"][ACTIVE])}
    pages = pages_of(unet, inputs)
    (whole,), (template,) = (unet.forward([Row(**each)]) for each in (edit, inputs))
    (some,) = unet.forward([Row(**edit, active=ACTIVE, pages=pages)])
    errors = [(some - exact[ACTIVE]).abs().mean() for exact in (whole, template)]
    assert 0 < errors[0] < 0.5 * errors[1]


@torch.inference_mode()
def test_leading_blocks_in_full_and_all_tokens_active_are_exact(unet: Unet) -> None:
    inputs, other = make_inputs(unet, 0), make_inputs(unet, 1)
    edit, pages = inputs | {"prompt_embeds": other["prompt_embeds"]}, pages_of(unet, inputs)
    (whole,) = unet.forward([Row(**edit)])
    row = Row(**edit, active=ACTIVE, pages=pages, full_blocks=range(pages.layout.num_blocks))
    (full,) = unet.forward([row])
    torch.testing.assert_close(full, whole[ACTIVE], atol=1e-4, rtol=1e-4)
    (every,) = unet.forward([replace(row, active=torch.arange(NUM_TOKENS), full_blocks=())])
    assert torch.equal(every, whole)


@torch.inference_mode()
@pytest.mark.parametrize("every", [2, 3])
def test_any_blocks_in_full_need_no_pages(unet: Unet, every: int) -> None:
    """Blocks between them have their pages; theirs contain garbage."""
    inputs, pages = make_inputs(unet, 0), pages_of(unet, make_inputs(unet, 0))
    (whole,) = unet.forward([Row(**inputs)])
    blocks = pages.near.view(pages.layout.num_blocks, -1)
    in_full = [block for number, block in enumerate(first_pages(unet)) if number % every]
    for first, stop in in_full:
        blocks[first:stop] = 0x7F
    row = Row(**inputs, active=ACTIVE, pages=pages, full_blocks=[first for first, _ in in_full])
    (some,) = unet.forward([row])
    assert (some - whole[ACTIVE]).abs().max() < 1e-4 * whole.std()
    (spoilt,) = unet.forward([replace(row, full_blocks=())])
    assert not (spoilt - whole[ACTIVE]).abs().max() < whole.std()


def first_pages(unet: Unet) -> list[tuple[int, int]]:
    """The first page of each block, and the end of the last."""
    runs = unet.block_runs(NUM_TOKENS)
    sizes = [run.pages for run in runs for _ in range(run.number)]
    assert sum(run.number * run.work for run in runs) == pytest.approx(1.0)
    return [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


@torch.inference_mode()
def test_chunks_change_no_bit_of_the_pages(unet: Unet) -> None:
    inputs, layout = make_inputs(unet, 2), unet.page_layout("int8")
    whole = prime(unet, inputs, layout)
    for stops in (tuple(range(1, layout.num_blocks)), (layout.num_blocks // 2,)):
        assert torch.equal(prime(unet, inputs, layout, stops), whole)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_between_keyframes_are_interpolated(unet: Unet, dtype: PageDtype) -> None:
    near, far = (make_inputs(unet, 0, sigma) for sigma in (0.6, 0.4))
    layout = unet.page_layout(dtype)
    entries = [prime(unet, each, layout) for each in (near, far)]
    middle = Row(**make_inputs(unet, 0, 0.5), active=ACTIVE)
    outputs = [
        unet.forward([replace(middle, pages=Pages(layout, NUM_TOKENS, entries[0], entries[1], weight))])[0]
        for weight in (0.0, 0.5, 1.0)
    ]
    (only_near,) = unet.forward([replace(middle, pages=Pages(layout, NUM_TOKENS, entries[0], None, 0.0))])
    torch.testing.assert_close(outputs[0], only_near)
    between = (outputs[0] + outputs[2]) / 2
    assert (outputs[1] - between).abs().max() < 0.1 * (outputs[0] - outputs[2]).abs().max()


def test_a_row_that_leaves_tokens_out_needs_pages(unet: Unet) -> None:
    with pytest.raises(ValueError, match="needs the template's pages"):
        unet.forward([Row(**make_inputs(unet, 0), active=ACTIVE)])


@torch.inference_mode()
def test_exact_and_masked_rows_share_a_batch(unet: Unet) -> None:
    inputs, other = make_inputs(unet, 0), make_inputs(unet, 3)
    rows = [Row(**inputs, active=ACTIVE, pages=pages_of(unet, inputs)), Row(**other), Row(**inputs)]
    alone = [unet.forward([row])[0] for row in rows]
    for together, before in zip(unet.forward(rows), alone, strict=True):
        assert torch.equal(together, before)


@pytest.mark.parametrize("keeps_rows", [True, False])
@torch.inference_mode()
def test_rows_of_a_request_share_a_pass_where_that_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, keeps_rows: bool
) -> None:
    """Which is not so in bfloat16 with AMX: another rank may have the other row."""
    monkeypatch.setattr(unet_module, "onednn_keeps_rows", lambda dtype: keeps_rows)
    unet = make_unet("sd", torch.bfloat16)
    inputs: dict[str, Any] = {
        name: x.bfloat16() if torch.is_tensor(x) else x for name, x in make_inputs(unet, 0).items()
    }
    row, passes = Row(**inputs), list[int]()
    rows = [row, replace(row, prompt_embeds=row.prompt_embeds + 1)]
    run = unet._run
    monkeypatch.setattr(unet, "_run", lambda some: passes.append(len(some)) or run(some))
    together = unet.forward(rows)
    assert passes == ([2] if keeps_rows else [1, 1])
    if not keeps_rows:
        for output, each in zip(together, rows, strict=True):
            assert torch.equal(output, unet.forward([each])[0])


@torch.inference_mode()
def test_a_chunk_may_run_twice(unet: Unet) -> None:
    """As after a failure half-way: a chunk does not change its inputs."""
    layout, inputs = unet.page_layout("int8"), make_inputs(unet, 0)
    cut, entry = layout.num_blocks // 2, torch.zeros(layout.entry_bytes(NUM_TOKENS), dtype=torch.uint8)
    (hidden,) = unet.prime([PrimeRow(**inputs, hidden=None, entry=entry)], (0, cut))
    row = PrimeRow(**inputs, hidden=hidden, entry=entry)
    for _ in range(2):
        assert unet.prime([row], (cut, layout.num_blocks)) == [()]
    assert torch.equal(entry, prime(unet, inputs, layout))


@torch.inference_mode()
@pytest.mark.parametrize("name", MAKE)
def test_own_content_in_bfloat16(name: str) -> None:
    unet = make_unet(name, torch.bfloat16)
    inputs = {
        key: value.bfloat16() if isinstance(value, Tensor) and key != "sigma" else value
        for key, value in make_inputs(unet, 0).items()
    }
    (whole,) = unet.forward([Row(**inputs)])
    (some,) = unet.forward([Row(**inputs, active=ACTIVE, pages=pages_of(unet, inputs, "bfloat16"))])
    assert some.dtype == whole.dtype == torch.bfloat16
    assert (some - whole[ACTIVE]).abs().max() < 0.1 * whole.std()


@torch.inference_mode()
def test_an_adapter_has_effect_in_every_kind_of_pass(unet: Unet) -> None:
    """Exact, primed and mask-aware; beside other rows, and in proportion to its scale. Rows without are unchanged."""
    inputs, generator = make_inputs(unet, 0), torch.Generator().manual_seed(5)
    block = "mid_block.attentions.0.transformer_blocks.0"
    layers = {
        name: LowRank(torch.randn(2, inputs_of, generator=generator), torch.randn(32, 2, generator=generator))
        for name, inputs_of in (
            (f"{block}.attn1.to_q", 32),
            (f"{block}.ff.net.2", 128),
            ("mid_block.resnets.0.conv1", 288),
        )
    }
    (before,) = unet.forward([Row(**inputs)])
    unet.patches.put("red", unet.patches.prepare(Adapter("red", Path("red.safetensors"), "red", {}), layers))
    red, pale = ({**inputs, "patches": (Patch("red", scale),)} for scale in (1.0, 0.01))
    masked = Row(**red, active=ACTIVE, pages=pages_of(unet, red))
    plain, whole, some, weak = unet.forward([Row(**inputs), Row(**red), masked, Row(**pale)])
    unet.patches.drop("red")
    assert (whole - before).abs().max() > 0.1 * before.std()
    assert (some - whole[ACTIVE]).abs().max() < 1e-4 * whole.std()
    assert 0 < (weak - before).abs().max() < 0.1 * (whole - before).abs().max()
    assert torch.equal(plain, before)


@torch.inference_mode()
def test_the_sum_of_two_adapters_is_one_with_both(unet: Unet) -> None:
    """Their scales count, and their order does not."""
    inputs, generator, name = make_inputs(unet, 0), torch.Generator().manual_seed(5), "mid_block.resnets.0.conv1"
    one, two = (
        LowRank(torch.randn(2, 288, generator=generator), torch.randn(32, 2, generator=generator)) for _ in range(2)
    )
    both = LowRank(torch.cat([one.down, two.down]), torch.cat([0.5 * one.up, -2.0 * two.up], dim=1))
    for patch, low in (("one", one), ("two", two), ("both", both)):
        adapter = Adapter(patch, Path(f"{patch}.safetensors"), patch, {})
        unet.patches.put(patch, unet.patches.prepare(adapter, {name: low}))
    chosen = ((Patch("both"),), (Patch("one", 0.5), Patch("two", -2.0)), (Patch("two", -2.0), Patch("one", 0.5)))
    whole, sum_, reversed_ = unet.forward([Row(**inputs, patches=patches) for patches in chosen])
    for patch in ("one", "two", "both"):
        unet.patches.drop(patch)
    torch.testing.assert_close(sum_, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reversed_, whole, rtol=1e-4, atol=1e-4)


def test_an_entry_of_another_size_is_refused(unet: Unet) -> None:
    row = PrimeRow(**make_inputs(unet, 0), hidden=None, entry=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="an entry of 64 bytes holds no pages of 12 tokens"):
        unet.prime([row], (0, 1))
