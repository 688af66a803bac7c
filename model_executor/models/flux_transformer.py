"""FLUX's denoiser, block by block, over the sublayers of a diffusers `FluxTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_flux.py`: with `plain_linear`, one request and every token active,
the result is bit-identical to the module's own forward. What differs is the batch: rows of many requests in one matrix
(see `ragged.py`), modulation computed per request, attention per request. And a request computes its active tokens
alone; their queries also see the keys and values of the template's other tokens, read from its pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from model_executor.attention import KeyValueBuffer, attend, head_major, normalise_and_rotate_
from model_executor.linear import PACKED_BYTES, Linear, LinearGroup, best_linear
from model_executor.models.base import PrimeRow, Row
from model_executor.pages import Entry, PageReader
from model_executor.ragged import Packing, Span, add_gated_, gather, modulate_

FLOAT16_MAX = 65504.0
CACHED_GRIDS = 32
"""Rotary tables kept, one per image size; a table is 8 bytes * tokens * head dim / 2."""

MODULATION_BYTES = 64 * 1024**2
"""Largest table of a request's modulation at all its noise levels: 1.2 MB for the embedded model at 28 steps."""

_MakeGroup = Callable[..., LinearGroup]
"""(*layers) -> their group."""


class FluxTransformer:
    """A ragged forward pass. `module` is a diffusers FluxTransformer2DModel; `num_train_timesteps` is its scheduler's.

    Weights and adapters must be in place when it is made (see `LinearGroup`).
    """

    def __init__(self, module: Any, num_train_timesteps: int, linear: Linear | None = None) -> None:
        self.module = module
        self.dtype: torch.dtype = module.dtype  # diffusers looks through all modules for it, 0.6 ms each time
        self._num_train_timesteps = num_train_timesteps
        self._linear = linear or best_linear()
        self._pack = sum(parameter.nbytes for parameter in module.parameters()) <= PACKED_BYTES
        self._image_in, self._text_in = self._group(module.x_embedder), self._group(module.context_embedder)
        self._blocks: list[_Block] = [_DoubleBlock(block, self._group) for block in module.transformer_blocks]
        self._blocks += [_SingleBlock(block, self._group) for block in module.single_transformer_blocks]
        self._modulations = [block.modulation for block in self._blocks]
        self._modulations.append(_Modulation([module.norm_out], self._group))
        self._image_out = self._group(module.proj_out)
        self._grid_rotary = lru_cache(maxsize=CACHED_GRIDS)(self._make_grid_rotary)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        heads, head_dim = self.module.config.num_attention_heads, self.module.config.attention_head_dim
        return PageLayout(num_blocks=self.num_blocks, num_heads=heads, head_dim=head_dim, dtype=dtype)

    def _group(self, *layers: nn.Module) -> LinearGroup:
        return LinearGroup(layers, self._linear, self._pack)

    # ------------------------------------------------------------------------------------------------------- passes

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width].

        Raises ValueError for a row that leaves tokens out and has no pages.
        """
        edits = [_Edit.of(row, self.num_blocks) for row in rows]
        stream = self._start(rows, edits, [edit.computed(0) for edit in edits])
        for number, block in enumerate(self._blocks):
            stream.keep([edit.kept(number) for edit in edits])
            block.run(stream, number)
        stream.keep([edit.kept(self.num_blocks) for edit in edits])
        velocity = self._project_out(stream)
        return [velocity[start:stop] for start, stop in stream.packing.image]

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """All image tokens of each row through the blocks [start, stop), whose pages are written into its entry.

        Returns each row's hidden state for the next chunk, [text and image tokens, hidden]; () after the last block, of
        which only keys and values are computed. A row's bits depend neither on the other rows nor on the chunks.
        """
        templates = [_Template(self._entry(row), len(row.latents)) for row in rows]
        stream = self._start(rows, templates, [None] * len(rows))
        for number in range(*blocks):
            if number == self.num_blocks - 1:
                self._blocks[number].finish(stream, number)
                return [()] * len(rows)
            self._blocks[number].run(stream, number)
        return [(stream.hidden[start:stop].clone(),) for start, stop in stream.packing.joint]

    def modulation(self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor) -> Tensor | None:
        """What `Row.modulation` may hold at each of these noise levels, [levels, width]: all blocks' shifts, scales and
        gates, with the bits that every step would compute. None where that is more than MODULATION_BYTES.
        """
        width = sum(part.width for part in self._modulations)
        if len(sigmas) * width * self.dtype.itemsize > MODULATION_BYTES:
            return None
        embeddings = [self._embedding(sigma, pooled_prompt_embeds, guidance_scale) for sigma in sigmas]
        conditioning = F.silu(torch.cat(embeddings))
        return torch.cat([part.product(conditioning) for part in self._modulations], dim=1)

    # ------------------------------------------------------------------------------------------------------- inputs

    def _start(
        self, rows: Sequence[Row | PrimeRow], sources: Sequence[_Source], computed: Sequence[Tensor | None]
    ) -> _Stream:
        """The stream before its first block; computed: the image tokens of each row that are in it, None for all."""
        packing = Packing.of(
            [row.prompt_embeds.shape[0] for row in rows],
            [
                row.latents.shape[0] if tokens is None else len(tokens)
                for row, tokens in zip(rows, computed, strict=True)
            ],
        )
        hidden = [row.hidden[0] for row in rows if isinstance(row, PrimeRow) and row.hidden is not None]
        rotary = torch.cat([self._rotary(row, tokens) for row, tokens in zip(rows, computed, strict=True)])
        joint = torch.cat(hidden) if hidden else self._embed(rows, computed, packing)
        longest = max(row.prompt_embeds.shape[0] + row.latents.shape[0] for row in rows)
        heads, head_dim = self.module.config.num_attention_heads, self.module.config.attention_head_dim
        buffer = KeyValueBuffer(heads, longest, head_dim, joint)
        return _Stream(joint, packing, rotary, self._modulation_of(rows), sources, buffer, self._linear)

    def _modulation_of(self, rows: Sequence[Row | PrimeRow]) -> Callable[[int], Sequence[Tensor]]:
        """Block number -> its shifts, scales and gates, each [requests, hidden]; after the last one the output's."""
        known = [row.modulation for row in rows if isinstance(row, Row) and row.modulation is not None]
        if len(known) == len(rows):
            tables = torch.cat(known).split([part.width for part in self._modulations], dim=1)
            return lambda number: self._modulations[number].parts(tables[number])
        embeddings = [self._embedding(row.sigma, row.pooled_prompt_embeds, row.guidance_scale) for row in rows]
        conditioning = F.silu(torch.cat(embeddings))
        return lambda number: self._modulations[number].parts(self._modulations[number].product(conditioning))

    def _embed(self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing) -> Tensor:
        """Text and image tokens of all rows, [tokens, hidden]."""
        inputs = [
            _select(torch.cat([row.latents, row.condition], dim=1), t) for row, t in zip(rows, computed, strict=True)
        ]
        image = self._image_in(torch.cat(inputs))
        text = self._text_in(torch.cat([row.prompt_embeds for row in rows]))
        return packing.join(text, image)

    def _embedding(self, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """Time, guidance and pooled text of one request, [1, hidden].

        One request at a time: a product's rounding may depend on its number of rows when these are few.
        """
        timestep = (sigma * self._num_train_timesteps).reshape(1).to(self.dtype)
        timestep = (timestep / 1000).to(self.dtype) * 1000  # the pipeline divides, the module multiplies
        inputs = [timestep, pooled_prompt_embeds[None]]
        if self.module.config.guidance_embeds:
            guidance = torch.full([1], guidance_scale, dtype=torch.float32, device=timestep.device)
            inputs.insert(1, guidance.to(self.dtype) * 1000)
        embedding: Tensor = self.module.time_text_embed(*inputs)
        return embedding

    def _rotary(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """Rotations of a request's text and these image tokens, complex64 [tokens, 1, 1, head dim / 2]."""
        grid = self._grid_rotary(row.grid)
        text = torch.ones_like(grid[:1]).expand(row.prompt_embeds.shape[0], -1, -1, -1)  # all at position 0: no turn
        return torch.cat([text, _select(grid, tokens)])

    def _make_grid_rotary(self, grid: tuple[int, int]) -> Tensor:
        """Rotations of every token of an image, row by row."""
        height, width = grid
        ids = torch.zeros(height, width, 3)
        ids[..., 1] = torch.arange(height)[:, None]
        ids[..., 2] = torch.arange(width)[None]
        cos, sin = self.module.pos_embed(ids.reshape(-1, 3).to(self.dtype))
        table = torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())  # each angle is stored twice
        return table[:, None, None].to(self.module.device)

    def _entry(self, row: PrimeRow) -> Entry:
        """The entry to write; its size tells the dtype of its pages."""
        num_tokens, size = len(row.latents), row.entry.numel()
        for layout in map(self.page_layout, get_args(PageDtype)):
            if layout.entry_bytes(num_tokens) == size:
                return Entry(row.entry, layout, num_tokens)
        raise ValueError(f"an entry of {size} bytes holds no pages of {num_tokens} tokens of this model")

    # ------------------------------------------------------------------------------------------------------- output

    def _project_out(self, stream: _Stream) -> Tensor:
        """Velocity of all image tokens, [tokens, latent width]."""
        scale, shift = stream.modulation(self.num_blocks)
        image = _layer_norm(gather(stream.hidden, stream.packing.joint_image), self.module.norm_out.norm.eps)
        return self._image_out(modulate_(image, stream.packing.image, scale, shift))


class _Source(Protocol):
    """Where the keys and values of a request's image tokens come from; num_tokens counts them."""

    @property
    def num_tokens(self) -> int: ...

    def place(self, number: int, fresh: Tensor, out: Tensor) -> None:
        """Keys and values of all image tokens in block `number` into `out`, [2, heads, image tokens, head dim]. fresh:
        those that the block computed, [2, heads, computed tokens, head dim]."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """A request of which the blocks before `full_blocks` compute all image tokens, the others the active ones."""

    num_tokens: int
    active: Tensor | None
    pages: PageReader | None
    full_blocks: int

    @classmethod
    def of(cls, row: Row, num_blocks: int) -> _Edit:
        num_tokens = row.latents.shape[0]
        if row.active is None or len(row.active) == num_tokens:
            return cls(num_tokens, None, None, num_blocks)
        if row.pages is None and row.full_blocks < num_blocks:
            raise ValueError("a request that leaves tokens out needs the template's pages")
        pages = None if row.pages is None else row.pages.open()
        return cls(num_tokens, row.active, pages, row.full_blocks)

    def computed(self, number: int) -> Tensor | None:
        """The image tokens that block `number` computes, None for all."""
        return None if number < self.full_blocks else self.active

    def kept(self, number: int) -> Tensor | None:
        """Those of the image tokens before block `number` that go on, None for all."""
        return self.active if number == self.full_blocks > 0 else None

    def place(self, number: int, fresh: Tensor, out: Tensor) -> None:
        active = self.computed(number)
        if active is None:
            out.copy_(fresh)
            return
        assert self.pages is not None
        self.pages.read(number, out)
        out.index_copy_(2, active, fresh)


@dataclass(frozen=True, slots=True)
class _Template:
    """A template that is primed: what a block computes is its page."""

    entry: Entry
    num_tokens: int

    def place(self, number: int, fresh: Tensor, out: Tensor) -> None:
        out.copy_(fresh)
        self.entry.write(number, out)


@dataclass(slots=True)
class _Stream:
    """The tokens of a batch on their way through the blocks.

    hidden: joint matrix [tokens, hidden], changed in place. rotary: complex64 [tokens, 1, 1, head dim / 2].
    modulation: block number -> its parts, each [requests, hidden].
    """

    hidden: Tensor
    packing: Packing
    rotary: Tensor
    modulation: Callable[[int], Sequence[Tensor]]
    sources: Sequence[_Source]
    buffer: KeyValueBuffer
    linear: Linear

    def keep(self, image_tokens: Sequence[Tensor | None]) -> None:
        """Go on with these image tokens of each request, None for all."""
        if all(tokens is None for tokens in image_tokens):
            return
        text, image = self.packing.joint_text, self.packing.joint_image
        rows = [_rows_of(*where) for where in zip(text, image, image_tokens, strict=True)]
        chosen = torch.cat(rows).to(self.hidden.device)
        lengths = [stop - start for start, stop in text]
        self.packing = Packing.of(lengths, [len(r) - length for r, length in zip(rows, lengths, strict=True)])
        self.hidden, self.rotary = self.hidden[chosen], self.rotary[chosen]

    def attention(self, number: int, qkv: Tensor) -> Tensor:
        """Every request's attention in block `number`. qkv: [tokens, 3, heads, head dim] -> [tokens, hidden]."""
        requests = zip(self.packing.joint_text, self.packing.joint_image, self.sources, strict=True)
        outputs = []
        for (start, image), (_, stop), source in requests:
            key_value = self.buffer.of(image - start + source.num_tokens)
            key_value[:, :, : image - start] = head_major(qkv[start:image, 1:])
            source.place(number, head_major(qkv[image:stop, 1:]), key_value[:, :, image - start :])
            outputs.append(attend(qkv[start:stop, 0], key_value, self.linear))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Modulation:
    """Shifts, scales and gates, from one product: a few rows over many weights.

    One for each block: the bits of a product may depend on its number of columns, and a pass over some blocks must
    give the bits of a pass over all.
    """

    def __init__(self, norms: Sequence[Any], group: _MakeGroup) -> None:
        """norms: diffusers' adaptive norms that read the same conditioning."""
        layers = [norm.linear for norm in norms]
        self._group, self._hidden = group(*layers), layers[0].in_features
        self.width = sum(layer.out_features for layer in layers)

    def product(self, conditioning: Tensor) -> Tensor:
        """conditioning: [levels, hidden] -> [levels, width]. A level's bits depend on it alone."""
        return self._group(conditioning)

    def parts(self, product: Tensor) -> Sequence[Tensor]:
        """[requests, width] -> parts of [requests, hidden], layer after layer."""
        parts: Sequence[Tensor] = product.chunk(self.width // self._hidden, dim=1)
        return parts


class _Block(ABC):
    """What both kinds of block have: modulation, and the image tokens' projections to queries, keys and values."""

    def __init__(self, block: Any, norms: Sequence[Any], group: _MakeGroup) -> None:
        """norms: those whose modulation is computed from the conditioning; the image tokens' first one leads."""
        attn = block.attn
        self.modulation = _Modulation(norms, group)
        self._head_dim = attn.head_dim
        self._norm_eps = norms[0].norm.eps
        self._qk_eps = attn.norm_q.eps
        self._qk_weight = _qk_weight(attn.norm_q, attn.norm_k)
        self._qkv = group(attn.to_q, attn.to_k, attn.to_v)

    @abstractmethod
    def run(self, stream: _Stream, number: int) -> None:
        """Take the stream through this block, the `number`-th."""

    def finish(self, stream: _Stream, number: int) -> None:
        """Only the keys and values of the image tokens, into the pages of the stream's templates."""
        packing = stream.packing
        image = _layer_norm(gather(stream.hidden, packing.joint_image), self._norm_eps)
        shift, scale, *_ = stream.modulation(number)
        modulate_(image, packing.image, scale, shift)
        # Queries come along: without their columns the product would round differently.
        key_value = self._heads(self._qkv(image), 3)[:, 1:]
        rotary = gather(stream.rotary, packing.joint_image)
        normalise_and_rotate_(key_value[:, :1], rotary, self._qk_eps, [(packing.image, self._qk_weight[1:])])
        for source, (start, stop) in zip(stream.sources, packing.image, strict=True):
            assert isinstance(source, _Template)
            source.entry.write(number, head_major(key_value[start:stop]))

    def _heads(self, x: Tensor, parts: int) -> Tensor:
        """[tokens, parts * hidden] -> [tokens, parts, heads, head dim]."""
        return x.view(len(x), parts, -1, self._head_dim)


class _DoubleBlock(_Block):
    """Text and image tokens have layers of their own and meet in attention."""

    def __init__(self, block: Any, group: _MakeGroup) -> None:
        super().__init__(block, [block.norm1, block.norm1_context], group)
        attn = block.attn
        self._text_qk_weight = _qk_weight(attn.norm_added_q, attn.norm_added_k)
        self._text_qkv = group(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        self._out, self._text_out = group(attn.to_out[0]), group(attn.to_add_out)
        self._up, self._down = group(block.ff.net[0].proj), group(block.ff.net[2])
        self._text_up, self._text_down = group(block.ff_context.net[0].proj), group(block.ff_context.net[2])

    def run(self, stream: _Stream, number: int) -> None:
        parts = stream.modulation(number)
        (shift, scale, gate, *mlp), (text_shift, text_scale, text_gate, *text_mlp) = parts[:6], parts[6:]
        text, image = self._normed(stream, (text_shift, text_scale), (shift, scale))
        attended = stream.attention(number, self._joint_qkv(stream, text, image))
        text, image = stream.packing.split(attended)
        self._add(stream, self._text_out(text), text_gate, self._out(image), gate)
        text, image = self._normed(stream, text_mlp, mlp)
        text = self._text_down(self._text_up(text, gelu=True))
        image = self._down(self._up(image, gelu=True))
        self._add(stream, text, text_mlp[2], image, mlp[2])

    def _normed(self, stream: _Stream, text: Sequence[Tensor], image: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Normed and modulated text and image matrices; text and image: shift and scale of theirs."""
        packing, normed = stream.packing, _layer_norm(stream.hidden, self._norm_eps)
        modulate_(normed, packing.joint_text, scale=text[1], shift=text[0])
        modulate_(normed, packing.joint_image, scale=image[1], shift=image[0])
        return packing.split(normed)

    def _joint_qkv(self, stream: _Stream, text: Tensor, image: Tensor) -> Tensor:
        """Queries, keys and values after norm and rotary, [tokens, 3, heads, head dim]."""
        packing = stream.packing
        qkv = self._heads(packing.join(self._text_qkv(text), self._qkv(image)), 3)
        weights = [(packing.joint_text, self._text_qk_weight), (packing.joint_image, self._qk_weight)]
        normalise_and_rotate_(qkv[:, :2], stream.rotary, self._qk_eps, weights)
        return qkv

    def _add(self, stream: _Stream, text: Tensor, text_gate: Tensor, image: Tensor, gate: Tensor) -> None:
        """The outcome of both streams onto the hidden state."""
        packing, hidden = stream.packing, stream.hidden
        add_gated_(hidden, packing.joint_text, text, packing.text, text_gate)
        add_gated_(hidden, packing.joint_image, image, packing.image, gate)
        for start, stop in packing.joint_text:
            _clip_float16_(hidden[start:stop])


class _SingleBlock(_Block):
    """All tokens share all layers; attention and MLP read the same input."""

    def __init__(self, block: Any, group: _MakeGroup) -> None:
        super().__init__(block, [block.norm], group)
        self._up, self._out = group(block.proj_mlp), group(block.proj_out)

    def run(self, stream: _Stream, number: int) -> None:
        shift, scale, gate = stream.modulation(number)
        joint = stream.packing.joint
        normed = modulate_(_layer_norm(stream.hidden, self._norm_eps), joint, scale, shift)
        inner = self._up(normed, gelu=True)
        qkv = self._heads(self._qkv(normed), 3)
        normalise_and_rotate_(qkv[:, :2], stream.rotary, self._qk_eps, [(joint, self._qk_weight)])
        attended = stream.attention(number, qkv)
        out = self._out(torch.cat([attended, inner], dim=1))
        add_gated_(stream.hidden, joint, out, joint, gate)
        _clip_float16_(stream.hidden)


def _qk_weight(query_norm: Any, key_norm: Any) -> Tensor:
    """Weights of the norms of queries and keys, float32 [2, 1, head dim]."""
    weight: Tensor = torch.stack([query_norm.weight, key_norm.weight]).detach().float()[:, None]
    return weight


def _layer_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def _select(x: Tensor, tokens: Tensor | None) -> Tensor:
    """These rows of x, None for all."""
    return x if tokens is None else x[tokens]


def _rows_of(text: Span, image: Span, tokens: Tensor | None) -> Tensor:
    """Rows of the joint matrix with a request's text and these of its image tokens, None for all."""
    if tokens is None:
        return torch.arange(text[0], image[1])
    return torch.cat([torch.arange(*text), image[0] + tokens.cpu()])


def _clip_float16_(x: Tensor) -> None:
    if x.dtype == torch.float16:
        x.clip_(-FLOAT16_MAX, FLOAT16_MAX)
