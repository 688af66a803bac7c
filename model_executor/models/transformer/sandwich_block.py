"""SandwichBlock: Z-Image's kind of block, whose attention and MLP are each between two root-mean-square norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from model_executor.kernels.attention import Attention, KeysValues
from model_executor.kernels.linear_groups import MakeGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.ragged import Span
from model_executor.kernels.residual import Addition, Norm
from model_executor.models.transformer.blocks import Block
from model_executor.models.transformer.feed_forward import FeedForward
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.projection import Projection
from model_executor.models.transformer.stream import Stream
from model_executor.page_cache.pages import Pages

PARTS = 4
"""A modulation has this many: a scale before and a gate after attention, and the same of the MLP."""


class Sandwich:
    """A block's layers, as of diffusers' `ZImageTransformerBlock`: attention and SwiGLU, each between two norms.

    Weights of norms are multiplied into what they are followed by: those before a layer into scales, those after it
    into gates.
    """

    def __init__(self, block: Any, group: MakeGroup) -> None:
        attn = block.attention
        norms = block.attention_norm1, block.attention_norm2, block.ffn_norm1, block.ffn_norm2
        self.weights = [norm.weight.detach().clone() for norm in norms]  # a view would keep the whole file mapped
        self.projection = Projection(attn, "", group)
        self._eps: float = block.attention_norm1.eps
        self._out, self._mlp = group(attn.to_out[0]), FeedForward(block.feed_forward, group)

    def run(
        self,
        stream: Stream,
        attention: Attention,
        place: tuple[int, int],
        rows: Sequence[Span],
        where: Segments,
        parts: Sequence[Tensor],
    ) -> None:
        """Advance these rows of the stream. attention: over them. place: numbers of block and page. where: the rows
        that patches change, among these. parts: [requests, hidden] each, scales and gates in turn."""
        factor, gate, second_factor, second_gate = parts
        residual, eps = stream.residual, self._eps
        (normed,) = residual.normed(eps, Norm(rows, factor, None))
        (attended,) = stream.attend(attention, *place, self.projection.project(normed, where, rows))
        residual.add(Addition(rows, self._out(attended, where), gate, norm_eps=eps))
        (normed,) = residual.normed(eps, Norm(rows, second_factor, None))
        residual.add(Addition(rows, self._mlp(normed, where, stream.operators), second_gate, norm_eps=eps))


class SandwichBlock(Block):
    """Scales and gates depend on the noise level. All tokens share all layers; or the image tokens, with those that
    fill them up, have the block for themselves."""

    def __init__(self, block: Any, group: MakeGroup, *, of_image: bool) -> None:
        self._layers = Sandwich(block, group)
        layers, weights = [block.adaLN_modulation[0]], self._layers.weights
        modulation = Modulation(layers, (0, 2), group, num_parts=PARTS, gates=(1, 3), weights=weights)
        super().__init__(modulation, block.attention_norm1, self._layers.projection)
        self.has_image_attention = of_image

    def run(self, stream: Stream, number: int) -> None:
        packing, where, place = stream.packing, stream.where, (number, self.page)
        parts = stream.modulation(number)
        if self.has_image_attention:
            assert stream.image_attention is not None
            self._layers.run(stream, stream.image_attention, place, packing.joint_filled, where.filled, parts)
        else:
            self._layers.run(stream, stream.joint_attention, place, packing.joint, where.joint, parts)

    def finish(self, stream: Stream, number: int) -> None:
        factor, *_ = stream.modulation(number)
        (image,) = stream.residual.normed(self._norm_eps, Norm(stream.packing.joint_image, factor, None))
        self._keep(stream, self.page, self._image, image)


class PromptBlock:
    """A block of text tokens alone, before they meet the image's, whose scales and gates are 1: no noise level is
    known."""

    def __init__(self, block: Any, group: MakeGroup) -> None:
        self._layers = Sandwich(block, group)

    def run(self, stream: Stream) -> None:
        """Advance a stream of one request without image tokens."""
        weights = [weight[None] for weight in self._layers.weights]
        packing, where = stream.packing, stream.where
        self._layers.run(stream, stream.joint_attention, (0, 0), packing.joint, where.joint, weights)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A prompt alone, of which nothing is cached."""

    text_tokens: int
    num_tokens: ClassVar[int] = 0
    fillers: ClassVar[int] = 0
    pages: ClassVar[Pages | None] = None
    is_in_order: ClassVar[bool] = True

    @property
    def text(self) -> slice:
        return slice(0, self.text_tokens)

    def computed(self, number: int) -> Tensor | None:
        return None

    def num_conditions(self, number: int) -> int:
        return 0

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        keys_values.put(fresh, None)

    def store(self, page: int, image: Tensor) -> None:
        """There is no image."""
