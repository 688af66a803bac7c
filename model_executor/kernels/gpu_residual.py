"""The hidden state of transformer blocks on a GPU: the kernel of a norm also makes the additions before it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from model_executor.kernels.gpu_sizes import CHUNK, power_of_two, warps
from model_executor.kernels.gpu_tables import norm_rows, table
from model_executor.kernels.residual import Addition, Norm, Residual


class TritonResidual(Residual):
    """Additions wait for a norm of the same rows. If something else follows, they are launched by themselves."""

    def __init__(self, hidden: Tensor, kernels: ModuleType) -> None:
        super().__init__(hidden, fused=True)
        self._kernels = kernels
        self._waiting: Sequence[Addition] = ()

    @property
    def hidden(self) -> Tensor:
        self._add_waiting()
        return self._hidden

    def add(self, *additions: Addition) -> None:
        self._add_waiting()
        self._waiting = additions

    def normed(self, eps: float, *norms: Norm) -> list[Tensor]:
        """As `Residual.normed`, of one norm or two whose factors and shifts are columns of one matrix."""
        wheres, device = tuple(tuple(norm.where) for norm in norms), self._hidden.device
        rows = norm_rows(wheres, tuple(tuple(each.where) for each in self._waiting), device)
        if rows is None:
            self._add_waiting()
            rows = norm_rows(wheres, (), device)
            assert rows is not None
        lengths = [sum(stop - start for start, stop in where) for where in wheres]
        out = self._launch(eps, norms, rows, lengths)
        self._waiting = ()
        return list(out.split(lengths))

    def _launch(self, eps: float, norms: Sequence[Norm], rows: Tensor, lengths: Sequence[int]) -> Tensor:
        width = self._hidden.shape[1]
        first, second = norms[0], norms[-1]
        out, block = self._hidden.new_empty(rows.shape[1], width), power_of_two(width)
        has_sums = bool(self._waiting)
        sums = self._waiting or [Addition((), self._hidden, first.factor)]
        self._kernels.add_norm[rows.shape[1],](
            *(self._hidden, rows, sums[0].y, sums[0].gate, sums[-1].y, sums[-1].gate),
            *(first.factor, first.shift, second.factor, second.shift, out, rows.shape[1], lengths[0]),
            *(self._hidden.stride(0), sums[0].y.stride(0), sums[-1].y.stride(0)),
            *(sums[0].gate.stride(0), first.factor.stride(0), width, eps),
            BLOCK=block,
            HAS_SUMS=has_sums,
            IS_CLIPPED=self._clips(sums),
            num_warps=warps(block),
        )
        return out

    def _add_waiting(self) -> None:
        width = self._hidden.shape[1]
        for where, y, gate, is_clipped in self._waiting:
            rows, requests = table(tuple(where), self._hidden.device)
            steps = self._hidden.stride(0), y.stride(0), gate.stride(0)
            self._kernels.add_gated[len(rows), -(-width // CHUNK)](
                *(self._hidden, rows, requests, y, gate, *steps, width),
                BLOCK=CHUNK,
                IS_CLIPPED=is_clipped and self._hidden.dtype == torch.float16,
            )
        self._waiting = ()

    def _clips(self, sums: Sequence[Addition]) -> bool:
        return self._hidden.dtype == torch.float16 and any(each.is_clipped for each in sums)
