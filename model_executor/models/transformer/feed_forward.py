"""FeedForward: the MLP of a transformer block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from model_executor.kernels.linear_groups import AnyGroup, MakeGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators


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
