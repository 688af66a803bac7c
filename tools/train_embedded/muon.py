"""Muon: momentum with orthogonalised updates (Jordan et al., 2024), scaled to AdamW's RMS (Liu et al., 2025)."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def orthogonalise(update: Tensor, iterations: int = 5) -> Tensor:
    """Newton-Schulz iteration in bf16 towards the nearest semi-orthogonal matrices; [..., rows, columns]."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    orthogonal: Tensor = (x.mT if tall else x).float()
    return orthogonal


class Muon(torch.optim.Optimizer):
    """For weights of two or more axes; convolutions count as [out, in * height * width].

    Weights of equal shape are orthogonalised in one batched call.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                buffer = state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"]).reshape(param.shape[0], -1)
                by_shape.setdefault((update.shape[0], update.shape[1]), []).append((param, update))
            for shape, members in by_shape.items():
                updates = orthogonalise(torch.stack([update for _, update in members])) * (0.2 * max(shape) ** 0.5)
                for (param, _), update in zip(members, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.view_as(param), alpha=-group["lr"])
