"""Data-parallel training in forked processes of one thread each, which is faster than threads for small matrices.

Forked children keep the parent's command line, so that a signal sent to processes by name reaches all of them.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=6)  # the others wait for a rank that is stopped by a signal


def launch(number: int, work: Callable[[int, int], None]) -> None:
    """Run `work(rank, number)` in `number` processes, rank 0 in this one; raises if another rank failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        context = multiprocessing.get_context("fork")
        others = [context.Process(target=_join, args=(meeting, rank, number, work)) for rank in range(1, number)]
        for process in others:
            process.start()
        _join(meeting, 0, number, work)
        for process in others:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a training process ended with {process.exitcode}")


def _join(meeting: str, rank: int, number: int, work: Callable[[int, int], None]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=number, timeout=PATIENCE)
    try:
        work(rank, number)
    finally:
        dist.destroy_process_group()


def average_gradients(params: Iterable[Tensor], extra: float) -> float:
    """Replace every gradient by its mean over the ranks, in one all-reduce; returns the mean of `extra`. One rank alone
    does not wait for its device.
    """
    if dist.get_world_size() == 1:
        return extra
    gradients = [param.grad for param in params if param.grad is not None]
    flat = torch.cat(
        [gradient.flatten() for gradient in gradients] + [torch.tensor([extra], device=gradients[0].device)]
    )
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
    return float(flat[-1])
