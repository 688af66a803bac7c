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
        is_rms = first.shift is None
        out, block = self._hidden.new_empty(rows.shape[1], width), power_of_two(width)
        has_sums = bool(self._waiting)
        sums = self._waiting or [Addition((), self._hidden, first.factor)]
        shifts = [norm.factor if norm.shift is None else norm.shift for norm in (first, second)]
        norm_eps = sums[0].norm_eps
        self._kernels.add_norm[rows.shape[1],](
            *(self._hidden, rows, sums[0].y, sums[0].gate, sums[-1].y, sums[-1].gate),
            *(first.factor, shifts[0], second.factor, shifts[1], out, rows.shape[1], lengths[0]),
            *(self._hidden.stride(0), sums[0].y.stride(0), sums[-1].y.stride(0)),
            *(sums[0].gate.stride(0), first.factor.stride(0), width, eps, norm_eps or 0.0),
            BLOCK=block,
            HAS_SUMS=has_sums,
            NORMS_SUMS=norm_eps is not None,
            IS_CLIPPED=self._clips(sums),
            IS_RMS=is_rms,
            num_warps=warps(block),
        )
        return out

    def _add_waiting(self) -> None:
        for each in self._waiting:
            if each.norm_eps is None:
                self._add_gated(each)
            else:
                self._add_normed(each, each.norm_eps)
        self._waiting = ()

    def _add_gated(self, each: Addition) -> None:
        width = self._hidden.shape[1]
        rows, requests = table(tuple(each.where), self._hidden.device)
        self._kernels.add_gated[len(rows), -(-width // CHUNK)](
            *(self._hidden, rows, requests, each.y, each.gate, *self._steps(each), width),
            BLOCK=CHUNK,
            IS_CLIPPED=self._clips([each]),
        )

    def _add_normed(self, each: Addition, eps: float) -> None:
        width = self._hidden.shape[1]
        rows, requests = table(tuple(each.where), self._hidden.device)
        block = power_of_two(width)
        self._kernels.add_normed[len(rows),](
            *(self._hidden, rows, requests, each.y, each.gate, *self._steps(each), width, eps),
            BLOCK=block,
            IS_CLIPPED=self._clips([each]),
            num_warps=warps(block),
        )

    def _steps(self, each: Addition) -> tuple[int, int, int]:
        """Numbers from row to row of the hidden state, of what is added, and of its gate."""
        return self._hidden.stride(0), each.y.stride(0), each.gate.stride(0)

    def _clips(self, sums: Sequence[Addition]) -> bool:
        return self._hidden.dtype == torch.float16 and any(each.is_clipped for each in sums)
