"""Transformer blocks of DiTs, over the sublayers of diffusers' own, for batches in which requests compute only some of
their tokens.

A block advances a `Stream`. Every attention over image tokens has its own page: most blocks have one, those with a
second attention two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from model_executor.kernels.attention import Projected, head_major
from model_executor.kernels.linear_groups import AnyGroup, MakeGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Span, gather
from model_executor.kernels.residual import Addition, Norm
from model_executor.kernels.tile_blocks import TileBlock, tile_block
from model_executor.models.transformer.feed_forward import FeedForward
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.projection import FusedProjection, Projection
from model_executor.models.transformer.stream import Stream


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
