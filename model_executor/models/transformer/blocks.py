"""Transformer blocks of DiTs, over the sublayers of diffusers' own, for batches in which requests compute only some of
their tokens.

`Stream` is the state of a batch between blocks. A `RowSource` supplies, for one request, the keys and values of the
tokens that are not computed. Every attention over image tokens has its own page: most blocks have one, those with a
second attention two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from model_executor.kernels import attention
from model_executor.kernels.attention import Attention, KeysValues, Projected, head_major
from model_executor.kernels.cpu_kernels import can_norm
from model_executor.kernels.linear_groups import AnyGroup, MakeGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Packing, Span, gather, together
from model_executor.kernels.residual import Addition, Norm, Residual
from model_executor.kernels.tile_blocks import BlockLayers, TileBlock, TilePass, tile_block
from model_executor.models.base import Row
from model_executor.page_cache.pages import PageEntry, Pages, Reader
from model_executor.patches.batch_patches import BatchPatches, Where


class RowSource(attention.KeyValueSource, Protocol):
    """One request in a pass. text_tokens: of its prompt, with fillers. fillers: how many of these, the last ones, fill
    up the image and take part in attention over the image alone. num_tokens: its image tokens, and the condition tokens
    that follow them. pages: what `load` reads, None if nothing."""

    @property
    def pages(self) -> Pages | None: ...

    @property
    def text(self) -> slice:
        """The text tokens that the pass computes."""

    @property
    def text_tokens(self) -> int: ...

    @property
    def fillers(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def num_conditions(self, number: int) -> int:
        """The condition tokens that the pass computes in block `number`; its last ones."""


def text_lengths(source: RowSource) -> tuple[int, int]:
    """How many text tokens of a request the pass computes, and how many of them fill up the image."""
    start, stop = source.text.start, source.text.stop
    return stop - start, stop - min(stop, max(start, source.text_tokens - source.fillers))


class EditSource:
    """A request whose leading blocks compute all image tokens, and whose other blocks compute the active ones."""

    is_in_order: ClassVar[bool] = True

    def __init__(
        self,
        row: Row,
        num_tokens: int,
        text_tokens: int,
        fillers: int,
        first_pages: Sequence[int],
        operators: Operators,
    ) -> None:
        """num_tokens, text_tokens, fillers: as in `RowSource`. first_pages: each block's first page; where it is among
        the row's `full_blocks`, the block computes all tokens. Raises ValueError for a row with active tokens but
        without pages."""
        self.num_tokens, self.text_tokens, self.fillers = num_tokens, text_tokens, fillers
        self._num_conditions = num_tokens - len(row.latents)
        self._active, self._full_blocks = row.active, sum(page in row.full_blocks for page in first_pages)
        may_repeat = row.pages is not None and row.pages.table is not None
        if row.active is None or (len(row.active) == self.num_tokens and not may_repeat):
            self._active, self._full_blocks = None, len(first_pages)
        elif row.pages is None and self._full_blocks < len(first_pages):
            raise ValueError("a request that leaves tokens out needs the template's pages")
        self.pages = row.pages
        self._operators = operators
        self.keeps_order = operators.is_invariant
        self._made = row.own.writer(operators.quantise) if row.own is not None and row.active is None else None
        self._rows: dict[int, Tensor] = {}  # text tokens before the image -> the tokens that the last block computes

    @property
    def text(self) -> slice:
        return slice(0, self.text_tokens)

    @property
    def makes_pages(self) -> bool:
        """Whether this pass makes the request's own pages."""
        return self._made is not None

    @property
    def active(self) -> Tensor | None:
        """The image tokens that the last block computes, None for all."""
        return self._active

    def _last_rows(self, text_tokens: int) -> Tensor:
        """The tokens that the last block computes, numbered with this many text tokens before the image."""
        assert self._active is not None
        if text_tokens not in self._rows:
            text = torch.arange(text_tokens, device=self._active.device)
            self._rows[text_tokens] = torch.cat([text, self._active + text_tokens])
        return self._rows[text_tokens]

    @cached_property
    def _reader(self) -> Reader:
        assert self.pages is not None
        return self._operators.open(self.pages)

    def computed(self, number: int) -> Tensor | None:
        return None if number < self._full_blocks else self._active

    def num_conditions(self, number: int) -> int:
        return self._num_conditions if self.computed(number) is None else 0

    def kept(self, number: int) -> Tensor | None:
        """Of the request's tokens before block `number`, those that this block still computes, None for all."""
        is_first = number == self._full_blocks > 0 and self._active is not None
        return self._last_rows(self.text_tokens) if is_first else None

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        computed = self.computed(number)
        if computed is None:
            keys_values.put(fresh, None)
        else:
            text_tokens = keys_values.text_tokens
            self.read_over(page, keys_values, fresh, self._last_rows(text_tokens) if text_tokens else computed)

    def read_over(self, page: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        """See `Reader.read_over`."""
        self._reader.read_over(page, keys_values, fresh, rows)

    def add_to(self, image: Tensor, number: int, added: Tensor) -> None:
        """Add to its image tokens, as they are after block `number`, in place. added: of the active ones, or all."""
        if self._active is None:
            image[: len(added)].add_(added)
        elif self.computed(number) is None:
            image.index_add_(0, self._active, added)
        else:
            image.add_(added)

    def store(self, page: int, image: Tensor) -> None:
        """Keep them as the request's own pages, if this pass makes these."""
        if self._made is not None:
            self._made.write(page, image)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template that is being primed: what a block computes is written as its page."""

    entry: PageEntry
    text_tokens: int
    num_tokens: int
    conditions: int  # of these tokens
    fillers: int
    pages: ClassVar[Pages | None] = None
    is_in_order: ClassVar[bool] = True

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        keys_values.put(fresh, None)

    def store(self, page: int, image: Tensor) -> None:
        self.entry.write(page, image)

    @property
    def text(self) -> slice:
        return slice(0, self.text_tokens)

    def computed(self, number: int) -> Tensor | None:
        return None

    def num_conditions(self, number: int) -> int:
        return self.conditions


@dataclass(slots=True)
class Stream:
    """The state of a batch as it passes through the blocks."""

    residual: Residual  # the hidden state: joint matrix [tokens, hidden], changed in place
    packing: Packing  # the rows of each request in it
    patches: BatchPatches  # of each request
    where: Where  # the rows that they change
    rotary: Tensor  # complex64 [tokens, 1, 1, head dim / 2]
    modulation: Callable[[int], Sequence[Tensor]]  # block number -> its parts, each [modulated spans, hidden]
    sources: Sequence[RowSource]  # one per request
    joint_attention: Attention  # over text and image together
    image_attention: Attention | None  # over the image tokens and their fillers alone, None if no block has it
    operators: Operators
    tiles: TilePass | None = None  # set by the first block that runs so

    @property
    def hidden(self) -> Tensor:
        """The hidden state, [tokens, hidden]."""
        return self.residual.hidden

    def attend(
        self, attention: Attention, number: int, page: int, *parts: Projected, out: Tensor | None = None
    ) -> list[Tensor]:
        """See `Operators.attend`."""
        return self.operators.attend(attention, number, page, parts, self.rotary, self.sources, out)

    def runs_with_tiles(self, block: TileBlock | None, number: int, page: int) -> bool:
        """Run a block, which is the `number`-th, by compiled functions. Returns whether there are any for it and for
        this batch: patches change no rows, and each request has one noise level."""
        where, packing = self.where, self.packing
        if block is None or block.kernels is not self.operators.kernels or where.text or where.image or where.joint:
            return False
        if packing.modulated_image is not packing.joint_image or not can_norm(self.hidden):
            return False
        parts = self.modulation(number)
        if parts[0].dtype != self.hidden.dtype:  # another rank has made the table
            return False
        if self.tiles is None:
            self.tiles = TilePass(block, self.joint_attention, self.hidden, self.rotary, packing)
        self.tiles.run(block, number, page, parts, self.sources)
        return True

    def keep(self, tokens: Sequence[Tensor | None], apart: Sequence[int] | None) -> None:
        """Drop all but these tokens of each request, numbered text before image; None keeps all. apart: of those that
        are left, as for `Packing.of`."""
        if all(kept is None for kept in tokens):
            return
        packing = self.packing
        hidden = self.residual.hidden
        rows = [_rows_of(span, kept, hidden.device) for span, kept in zip(packing.joint, tokens, strict=True)]
        chosen = together(rows)
        lengths = [stop - start for start, stop in packing.joint_text]
        images = [len(r) - length for r, length in zip(rows, lengths, strict=True)]
        self.packing = Packing.of(lengths, images, packing.fillers, apart)
        self.where = self.patches.on(self.packing)
        self.residual, self.rotary = self.operators.residual(hidden[chosen]), self.rotary[chosen]
        self.tiles = None


class Modulation:
    """A block's shifts, scales and gates, computed as one product of few rows with many weights.

    There is one per block, or one for several that share its layers, and not one for all, because a product's bits may
    depend on its number of columns, and a pass over some blocks must give the same bits as a pass over all.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        scales: Sequence[int],
        group: MakeGroup,
        *,
        num_parts: int | None = None,
        gates: Sequence[int] = (),
        weights: Sequence[Tensor] = (),
    ) -> None:
        """layers: the linear ones of adaptive norms that read the same conditioning. scales: which of their parts are
        scales. num_parts: None: parts are as wide as what the layers read. gates: which parts are put through tanh.
        weights: [hidden] each, by which the parts are multiplied at last; none: they are not."""
        self._group, self._scales, self._gates, self._weights = group(*layers), scales, gates, weights
        self.width = sum(layer.out_features for layer in layers)
        self._num_parts = num_parts or self.width // layers[0].in_features

    def product(self, conditioning: Tensor, where: Segments = ()) -> Tensor:
        """conditioning: [levels, width of what the layers read] -> [levels, width], with all done that is done to its
        parts. A level's bits do not depend on the other levels. where: the rows that patches change."""
        product = self._group(conditioning, where)
        parts = self.parts(product)
        for index in self._scales:
            parts[index].add_(1)
        for index in self._gates:
            parts[index].tanh_()
        for part, weight in zip(parts, self._weights, strict=False):
            part.mul_(weight)
        return product

    def parts(self, product: Tensor) -> Sequence[Tensor]:
        """[modulated spans, width] -> parts of [modulated spans, hidden], in the order of the norms."""
        parts: Sequence[Tensor] = product.chunk(self._num_parts, dim=1)
        return parts


class Block(ABC):
    """Base of all kinds of block: modulation, and the image tokens' projections to queries, keys and values."""

    num_pages = 1

    has_image_attention = False
    """Whether it has an attention over the image tokens and their fillers alone."""

    def __init__(self, modulation: Modulation, norm: Any, image: Projection) -> None:
        """modulation: other blocks may have the same. norm: the image tokens' first one, diffusers' plain or adaptive.
        image: the image tokens' projections."""
        self.page = 0  # its first page; set by the Denoiser
        self.modulation = modulation
        self._norm_eps: float = getattr(norm, "norm", norm).eps
        self._image = image

    @property
    def has_norm(self) -> bool:
        """Whether it normalises and rotates queries and keys."""
        return self._image.weight is not None

    @abstractmethod
    def run(self, stream: Stream, number: int) -> None:
        """Advance the stream through this block, the `number`-th."""

    def finish(self, stream: Stream, number: int) -> None:
        """Compute only the image tokens' keys and values, and write them to the pages of the stream's templates."""
        shift, factor, *_ = stream.modulation(number)
        (image,) = stream.residual.normed(self._norm_eps, Norm(stream.packing.modulated_image, factor, shift))
        self._keep(stream, self.page, self._image, image)

    def _keep(self, stream: Stream, page: int, projection: Projection, image: Tensor) -> None:
        """Write keys and values of normed image tokens to this page of each template."""
        packing = stream.packing
        # Queries are computed too: without their columns the product would round differently.
        key_value = projection.heads(image, stream.where.image)[:, 1:]
        projection.turn_(key_value[:, :1], gather(stream.rotary, packing.joint_image), stream.operators, first=1)
        for source, (start, stop) in zip(stream.sources, packing.image, strict=True):
            source.store(page, head_major(key_value[start:stop]))


class Projection:
    """The layers that give an attention's queries, keys and values for one kind of token, with their norm, if any."""

    def __init__(self, attn: Any, added: str, group: MakeGroup) -> None:
        """added: "" for image tokens, "added" for text tokens, as in diffusers' names of their layers."""
        norms = [getattr(attn, f"norm_{added}_{part}" if added else f"norm_{part}") for part in "qk"]
        self._layers = group(*self._layers_of(attn, added))
        self._heads = attn.heads
        self.eps = 0.0 if norms[0] is None else norms[0].eps
        self.weight = None if norms[0] is None else _qk_weight(norms[0], norms[1], attn.heads)

    @staticmethod
    def _layers_of(attn: Any, added: str) -> list[Any]:
        names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
        return [getattr(attn, name) for name in names]

    def __call__(self, x: Tensor, where: Segments) -> Tensor:
        """[tokens, hidden] -> [tokens, 3 * hidden], before norm and rotary embedding. where: the rows that patches
        change."""
        return self._layers(x, where)

    def heads(self, x: Tensor, where: Segments) -> Tensor:
        """As `__call__`, [tokens, 3, heads, head dim]."""
        return self._in_heads(self(x, where))

    def _in_heads(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), 3, self._heads, qkv.shape[1] // (3 * self._heads))

    def project(self, x: Tensor, where: Segments, rows: Sequence[Span]) -> Projected:
        """Queries, keys and values for attention. rows: each request's rows of the stream."""
        return Projected(self.heads(x, where), rows, self.weight, self.eps)

    def beside(self, out: AnyGroup, up: AnyGroup, down: AnyGroup | None, eps: float) -> BlockLayers:
        """With the other layers of a block, as for `BlockLayers`."""
        return BlockLayers(self._layers, out, up, down, self.weight, self.eps, eps)

    def turn_(self, x: Tensor, rotary: Tensor, operators: Operators, first: int = 0) -> None:
        """Apply norm and rotary embedding in place. x: [tokens, n, heads, head dim], queries (0) and keys (1), starting
        with `first`."""
        if self.weight is not None:
            operators.normalise_and_rotate_(x, rotary, self.eps, [([(0, len(x))], self.weight[first:])])


class FusedProjection(Projection):
    """That of an attention whose one layer also gives the numbers that an MLP reads, after queries, keys and values."""

    def __init__(self, attn: Any, group: MakeGroup) -> None:
        super().__init__(attn, "", group)
        self._width: int = 3 * attn.inner_dim

    @staticmethod
    def _layers_of(attn: Any, added: str) -> list[Any]:
        return [attn.to_qkv_mlp_proj]

    def heads(self, x: Tensor, where: Segments) -> Tensor:
        return self._in_heads(self(x, where)[:, : self._width])

    def both(self, x: Tensor, where: Segments, rows: Sequence[Span]) -> tuple[Projected, Tensor]:
        """Returns what `project` does, and what the MLP reads."""
        product = self(x, where)
        qkv = self._in_heads(product[:, : self._width])
        return Projected(qkv, rows, self.weight, self.eps), product[:, self._width :]


class FeedForward:
    """A block's MLP: two layers, with GELU's tanh approximation between them, or with SwiGLU."""

    def __init__(self, mlp: Any, group: MakeGroup) -> None:
        """mlp: diffusers' `FeedForward`; FLUX.2's, whose first layer gives gate and numbers; or Z-Image's, which has a
        layer for each."""
        self.is_gated = not hasattr(mlp, "net")
        if hasattr(mlp, "w1"):
            self._up, self._down = group(mlp.w1, mlp.w3), group(mlp.w2)
        else:
            up, down = (mlp.linear_in, mlp.linear_out) if self.is_gated else (mlp.net[0].proj, mlp.net[2])
            self._up, self._down = group(up), group(down)

    @property
    def layers(self) -> tuple[AnyGroup, AnyGroup]:
        """The first one and the last one."""
        return self._up, self._down

    def __call__(self, x: Tensor, where: Segments, operators: Operators) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. where: the rows that patches change."""
        inner = operators.swiglu(self._up(x, where)) if self.is_gated else self._up(x, where, gelu=True)
        return self._down(inner, where)


class DoubleBlock(Block):
    """Text and image tokens have layers of their own and meet in attention.

    In some models some blocks have a second attention, over the image tokens alone; and the last block does not compute
    text tokens, as nothing reads them afterwards.
    """

    def __init__(self, block: Any, group: MakeGroup, modulation: Modulation | None = None) -> None:
        """modulation: of several blocks, parts of image tokens before those of text tokens; None: the block's adaptive
        norms have layers for it."""
        attn, second = block.attn, getattr(block, "attn2", None)
        self._is_last = getattr(block, "context_pre_only", False)
        self._num_image_parts = 6 if second is None else 9
        if modulation is None:
            text_scales = (0,) if self._is_last else (1, 4)
            scales = [*range(1, self._num_image_parts, 3), *(self._num_image_parts + scale for scale in text_scales)]
            modulation = Modulation([block.norm1.linear, block.norm1_context.linear], scales, group)
        super().__init__(modulation, block.norm1, Projection(attn, "", group))
        self._text = Projection(attn, "added", group)
        self._out = group(attn.to_out[0])
        self._mlp = FeedForward(block.ff, group)
        if not self._is_last:
            self._text_out = group(attn.to_add_out)
            self._text_mlp = FeedForward(block.ff_context, group)
        self._second = None if second is None else Projection(second, "", group)
        self._second_out = None if second is None else group(second.to_out[0])
        self.num_pages = 1 if second is None else 2
        self.has_image_attention = second is not None
        self._tiles = self._with_tiles()

    def _with_tiles(self) -> TileBlock | None:
        if self._is_last or self.has_image_attention or self._mlp.is_gated:
            return None
        text = self._text.beside(self._text_out, *self._text_mlp.layers, self._norm_eps)
        image = self._image.beside(self._out, *self._mlp.layers, self._norm_eps)
        return tile_block("double", [text, image])

    def run(self, stream: Stream, number: int) -> None:
        if stream.runs_with_tiles(self._tiles, number, self.page):
            return
        parts, packing, where = stream.modulation(number), stream.packing, stream.where
        (shift, factor, gate, *mlp), text_parts = parts[: self._num_image_parts], parts[self._num_image_parts :]
        # A last norm gives scale before shift, the others shift before scale.
        text_factor, text_shift = (text_parts[0], text_parts[1]) if self._is_last else (text_parts[1], text_parts[0])
        norms = [
            Norm(packing.modulated_text, text_factor, text_shift),
            Norm(packing.modulated_image, factor, shift),
        ]
        text, image = stream.residual.normed(self._norm_eps, *norms)
        beside = self._image_alone(stream, number, mlp[3:])
        text, image = stream.attend(
            stream.joint_attention,
            number,
            self.page,
            self._text.project(text, where.text, packing.joint_text),
            self._image.project(image, where.image, packing.joint_image),
        )
        image = self._out(image, where.image)
        if beside is not None:
            stream.residual.add(Addition(packing.modulated_image, image, gate))
            image, gate = beside, mlp[5]
        norms = [Norm(packing.modulated_image, mlp[1], mlp[0])]
        if self._is_last:
            self._add(stream, image, gate)
        else:
            self._add(stream, image, gate, self._text_out(text, where.text), text_parts[2])
            norms.insert(0, Norm(packing.modulated_text, text_parts[4], text_parts[3]))
        *texts, image = stream.residual.normed(self._norm_eps, *norms)
        of_text = [self._text_mlp(text, where.text, stream.operators) for text in texts]
        image = self._mlp(image, where.image, stream.operators)
        self._add(stream, image, mlp[2], *of_text, *text_parts[5:])

    @staticmethod
    def _add(
        stream: Stream, image: Tensor, gate: Tensor, text: Tensor | None = None, text_gate: Tensor | None = None
    ) -> None:
        """Add a layer's output for the image tokens, and that for the text tokens where there is one."""
        added = [Addition(stream.packing.modulated_image, image, gate)]
        if text is not None and text_gate is not None:
            added.insert(0, Addition(stream.packing.modulated_text, text, text_gate, is_clipped=True))
        stream.residual.add(*added)

    def finish(self, stream: Stream, number: int) -> None:
        super().finish(stream, number)
        if self._second is not None:
            shift, factor, _ = stream.modulation(number)[6:9]
            (image,) = stream.residual.normed(self._norm_eps, Norm(stream.packing.modulated_image, factor, shift))
            self._keep(stream, self.page + 1, self._second, image)

    def _image_alone(self, stream: Stream, number: int, parts: Sequence[Tensor]) -> Tensor | None:
        """The second attention's output for the image tokens, before its gate. parts: its shift, scale and gate."""
        if self._second is None or self._second_out is None or stream.image_attention is None:
            return None
        packing, where = stream.packing, stream.where.image
        (image,) = stream.residual.normed(self._norm_eps, Norm(packing.modulated_image, parts[1], parts[0]))
        projected = self._second.project(image, where, packing.joint_image)
        (attended,) = stream.attend(stream.image_attention, number, self.page + 1, projected)
        return self._second_out(attended, where)


class JointBlock(Block):
    """All tokens share all layers; attention and MLP read the same input, and have one layer after them."""

    def __init__(self, modulation: Modulation, norm: Any, image: Projection, out: AnyGroup, inner: int) -> None:
        """modulation, norm, image: as for `Block`. out: the layer after attention and MLP. inner: numbers of a token
        that it reads of the MLP."""
        super().__init__(modulation, norm, image)
        self._out, self._inner = out, inner

    def run(self, stream: Stream, number: int) -> None:
        shift, factor, gate = stream.modulation(number)
        joint, where = stream.packing.joint, stream.where.joint
        (normed,) = stream.residual.normed(self._norm_eps, Norm(joint, factor, shift))
        projected, read = self._projected(normed, where, joint)
        if self._out.takes_columns(where):
            (attended,) = stream.attend(stream.joint_attention, number, self.page, projected)
            out = self._out.of_columns([attended, self._activated(read, where, stream.operators)])
        else:
            width = projected.qkv.shape[2] * projected.qkv.shape[3]
            both = normed.new_empty(len(normed), width + self._inner)
            self._activated(read, where, stream.operators, both[:, width:])
            stream.attend(stream.joint_attention, number, self.page, projected, out=both[:, :width])
            out = self._out(both, where)
        stream.residual.add(Addition(joint, out, gate, is_clipped=True))

    @abstractmethod
    def _projected(self, normed: Tensor, where: Segments, rows: Sequence[Span]) -> tuple[Projected, Tensor]:
        """Queries, keys and values, and what the MLP reads. rows: as for `Projection.project`."""

    @abstractmethod
    def _activated(self, x: Tensor, where: Segments, operators: Operators, out: Tensor | None = None) -> Tensor:
        """The MLP's inner numbers, [tokens, inner], which are `out` if that is given. x: what it reads."""


class SingleBlock(JointBlock):
    """FLUX's: attention and MLP have layers of their own before the last one."""

    def __init__(self, block: Any, group: MakeGroup) -> None:
        modulation = Modulation([block.norm.linear], [1], group)
        image = Projection(block.attn, "", group)
        self._up, out = group(block.proj_mlp), group(block.proj_out)
        super().__init__(modulation, block.norm, image, out, self._up.num_outputs)
        self._tiles = tile_block("single", [image.beside(out, self._up, None, self._norm_eps)])

    def run(self, stream: Stream, number: int) -> None:
        if not stream.runs_with_tiles(self._tiles, number, self.page):
            super().run(stream, number)

    def _projected(self, normed: Tensor, where: Segments, rows: Sequence[Span]) -> tuple[Projected, Tensor]:
        return self._image.project(normed, where, rows), normed

    def _activated(self, x: Tensor, where: Segments, operators: Operators, out: Tensor | None = None) -> Tensor:
        return self._up(x, where, gelu=True, out=out)


class FusedBlock(JointBlock):
    """FLUX.2's: one layer gives queries, keys and values, and gate and numbers of SwiGLU."""

    _image: FusedProjection

    def __init__(self, block: Any, group: MakeGroup, modulation: Modulation) -> None:
        """modulation: of several blocks."""
        attn = block.attn
        super().__init__(modulation, block.norm, FusedProjection(attn, group), group(attn.to_out), attn.mlp_hidden_dim)

    def _projected(self, normed: Tensor, where: Segments, rows: Sequence[Span]) -> tuple[Projected, Tensor]:
        return self._image.both(normed, where, rows)

    def _activated(self, x: Tensor, where: Segments, operators: Operators, out: Tensor | None = None) -> Tensor:
        return operators.swiglu(x, out)


class ImageBlock(Block):
    """Image tokens alone, in models without text tokens: attention, then MLP, each with shift, scale and gate."""

    def __init__(self, block: Any, group: MakeGroup) -> None:
        """block: diffusers' `BasicTransformerBlock` with `ada_norm_zero`."""
        modulation = Modulation([block.norm1.linear], [1, 4], group)
        super().__init__(modulation, block.norm1, Projection(block.attn1, "", group))
        self._second_eps = block.norm3.eps
        self._out = group(block.attn1.to_out[0])
        self._mlp = FeedForward(block.ff, group)

    def run(self, stream: Stream, number: int) -> None:
        shift, factor, gate, second_shift, second_factor, second_gate = stream.modulation(number)
        image, where = stream.packing.joint_image, stream.where.image
        (normed,) = stream.residual.normed(self._norm_eps, Norm(image, factor, shift))
        projected = self._image.project(normed, where, image)
        (attended,) = stream.attend(stream.joint_attention, number, self.page, projected)
        stream.residual.add(Addition(image, self._out(attended, where), gate))
        (normed,) = stream.residual.normed(self._second_eps, Norm(image, second_factor, second_shift))
        out = self._mlp(normed, where, stream.operators)
        stream.residual.add(Addition(image, out, second_gate))


def _qk_weight(query_norm: Any, key_norm: Any, heads: int) -> Tensor:
    """Weights of the norms of queries and keys, float32 [2, heads, head dim]. Repeated for every head: multiplying is
    then faster, by a quarter of a pass."""
    weight = torch.stack([query_norm.weight, key_norm.weight]).detach().float()
    return weight[:, None].repeat(1, heads, 1)


def _rows_of(span: Span, tokens: Tensor | None, device: torch.device) -> Tensor:
    """Rows of the joint matrix that hold these tokens of a request, None for all."""
    return torch.arange(*span, device=device) if tokens is None else span[0] + tokens
