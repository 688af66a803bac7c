"""Blocks by compiled functions against the same blocks operator by operator; skipped without AMX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import has_tiles
from model_executor.kernels.tile_blocks import TilePass
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.stream import Stream
from model_executor.page_cache.pages import Pages
from tools.random_checkpoints import flux_transformer

WIDTH, GRID = 64, (6, 8)
TOKENS = GRID[0] * GRID[1]

pytestmark = pytest.mark.skipif(not has_tiles(), reason="no AMX on this machine")


@pytest.fixture
def flux() -> FluxTransformer:
    torch.manual_seed(0)
    return FluxTransformer(flux_transformer(WIDTH, False).to(torch.bfloat16).eval(), 1000)


def draw(*size: int) -> Tensor:
    return torch.randn(size).to(torch.bfloat16)


def exact(text_tokens: int) -> Row:
    return Row(
        latents=draw(TOKENS, 64),
        condition=draw(TOKENS, 320),
        prompt_embeds=draw(text_tokens, WIDTH),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(0.6),
        guidance_scale=1.0,
        grid=GRID,
    )


def masked(flux: FluxTransformer, text_tokens: int, active: Sequence[int], full_blocks: Sequence[int] = ()) -> Row:
    """Over int8 pages of its own inputs."""
    row, layout = exact(text_tokens), flux.page_layout("int8")
    entry = torch.zeros(layout.entry_bytes(TOKENS), dtype=torch.uint8)
    names = "latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid"
    prime = PrimeRow(**{name: getattr(row, name) for name in names}, hidden=None, entry=entry)
    flux.prime([prime], (0, flux.num_pages))
    pages = Pages(layout, TOKENS, entry, None, 0.0)
    return replace(row, active=torch.tensor(active), pages=pages, full_blocks=full_blocks)


@torch.inference_mode()
def test_blocks_have_the_bits_of_their_operators(flux: FluxTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in company: text and image tokens of several requests lie between one another."""
    rows = [masked(flux, 8, [3, 4, 40]), exact(11), masked(flux, 5, list(range(33)), full_blocks=[0]), exact(1)]
    batches = [[rows[0]], [rows[1]], rows]
    passes: list[TilePass] = []
    run = TilePass.run
    monkeypatch.setattr(TilePass, "run", lambda tiles, *args: (passes.append(tiles), run(tiles, *args)))
    ours = [flux.forward(batch) for batch in batches]
    # The last batch drops tokens after its first block: what the blocks of a pass share is made again.
    blocks = flux.num_pages
    assert [passes.count(tiles) for tiles in dict.fromkeys(passes)] == [blocks, blocks, 1, blocks - 1]
    monkeypatch.setattr(Stream, "runs_with_tiles", lambda *args: False)
    for outputs, expected in zip(ours, map(flux.forward, batches), strict=True):
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("name", ["transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_mlp"])
@torch.inference_mode()
def test_biases_in_float32_are_refused_as_by_a_layer_alone(name: str) -> None:
    """C would read twice as many numbers as there are."""
    module = flux_transformer(WIDTH, False).to(torch.bfloat16).eval()
    layer = module.get_submodule(name)
    layer.bias = nn.Parameter(layer.bias.float())
    with pytest.raises(TypeError, match="float32"):
        FluxTransformer(module, 1000).forward([exact(8)])


@torch.inference_mode()
def test_a_table_in_float32_gives_the_same_bits(flux: FluxTransformer) -> None:
    """As one that another rank has sent."""
    row = exact(8)
    inputs = ModulationInputs(row.pooled_prompt_embeds, row.guidance_scale, row.sigma[None], 1)
    table = flux.modulation(inputs)
    assert table is not None
    (ours,), (theirs,) = (flux.forward([replace(row, modulation=each)]) for each in (table, table.float()))
    assert torch.equal(ours, theirs)
