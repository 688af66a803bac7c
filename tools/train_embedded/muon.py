"""The Muon optimiser: momentum with orthogonalised updates (Jordan et al., 2024), scaled to AdamW's RMS (Liu et al.,
2025).
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from tools.train_embedded.training import has_fast_bfloat16


@torch.no_grad()
def orthogonalise(update: Tensor, iterations: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices, in bf16 where it is fast;
    [batch, rows, columns].
    """
    tall = update.shape[-2] > update.shape[-1]
    x = (update.mT if tall else update).contiguous()
    x = x.bfloat16() if has_fast_bfloat16(x.device) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal


class Muon(torch.optim.Optimizer):
    """For weights with two or more axes; convolutions are treated as [out, in * height * width].

    Weights of equal shape are orthogonalised in one batched call. Under torch.distributed, where every rank has the
    same gradients, each rank orthogonalises its part of the weights and leaves the other updates zero; then they are
    summed.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            by_shape: dict[tuple[int, int], list[int]] = {}  # matrix shape -> indices into params
            for i, param in enumerate(params):
                by_shape.setdefault((len(param), param.numel() // len(param)), []).append(i)
            updates = self._orthogonal_updates(params, by_shape, group["momentum"])
            for i, param in enumerate(params):
                step_size = group["lr"] * 0.2 * max(len(param), param.numel() // len(param)) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(updates[i].view_as(param), alpha=-step_size)

    def _orthogonal_updates(
        self, params: list[Tensor], by_shape: dict[tuple[int, int], list[int]], momentum: float
    ) -> list[Tensor]:
        """A flat bfloat16 update for each weight, equal on all ranks."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        smoothed = [self._smooth(param, momentum) for param in params]
        flat = torch.zeros(sum(param.numel() for param in params), dtype=torch.bfloat16, device=params[0].device)
        updates = list(flat.split([param.numel() for param in params]))
        for shape, members in by_shape.items():
            own = members[rank::ranks]
            if own:
                done = orthogonalise(torch.stack([smoothed[i].reshape(shape) for i in own]))
                for i, update in zip(own, done, strict=True):
                    updates[i].copy_(update.flatten())
        if ranks > 1:
            dist.all_reduce(flat)
        return updates

    def _smooth(self, param: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum."""
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        assert param.grad is not None
        buffer = state["momentum"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)
