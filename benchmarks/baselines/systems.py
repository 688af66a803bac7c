"""The systems that are compared, by name, and how each is started: one URL, whatever is behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.load.server import STENCIL, Server, ready_server

DIFFUSERS = "benchmarks.baselines.diffusers_server"
INLINE = "benchmarks.baselines.inline_server"
BALANCER = "benchmarks.baselines.balancer"

FIRST_BLOCK_CACHE = 0.5
"""Threshold, chosen by `python -m benchmarks.baselines.tune_first_block_cache`."""


@dataclass(frozen=True)
class System:
    """label: in tables. module: run as a process for each engine, or for all of them where it is Stencil.
    is_mask_aware: what an edit takes depends on its mask, and on what was edited before.
    """

    label: str
    module: str
    flags: tuple[str, ...] = ()
    is_mask_aware: bool = False


SYSTEMS = {
    "diffusers": System("diffusers, one at a time", DIFFUSERS),
    "diffusers-batch": System("diffusers, static batches of 8", DIFFUSERS, ("--batch-size", "8")),
    "diffusers-skip": System(
        "diffusers, static batches, first-block cache",
        DIFFUSERS,
        ("--batch-size", "8", "--first-block-cache", str(FIRST_BLOCK_CACHE)),
    ),
    "mask-aware-alone": System(
        "mask-aware, one at a time (FISEdit emulated)",
        STENCIL,
        ("--max-num-seqs", "1", "--router-policy", "least-requests"),
        is_mask_aware=True,
    ),
    "stencil-exact": System("Stencil, mask-aware off", STENCIL, ("--no-mask-aware",)),
    "stencil-inline": System("Stencil's engine, image work in line", INLINE, is_mask_aware=True),
    "stencil": System("Stencil", STENCIL, is_mask_aware=True),
}
"""FISEdit itself runs with Stable Diffusion 2.1 on GPUs before Hopper. What is emulated is how it serves: mask-aware,
one edit at a time, since it does not batch edits of different masks."""


@dataclass(frozen=True)
class Setting:
    """What all systems share. threads: torch threads of each engine."""

    model: str
    dtype: str = "float32"
    threads: int = 1
    engines: int = 1

    @property
    def flags(self) -> list[str]:
        return ["--model", self.model, "--dtype", self.dtype, "--threads", str(self.threads)]


@contextmanager
def running(name: str, setting: Setting) -> Iterator[Server]:
    """The system, ready. Several engines: Stencil's own router, or a balancer before as many processes."""
    system = SYSTEMS[name]
    flags = [*setting.flags, *system.flags]
    if system.module == STENCIL:
        with ready_server([*flags, "--data-parallel-size", str(setting.engines), "--max-queue", "4096"]) as server:
            yield server
        return
    with ExitStack() as stack:
        servers = [stack.enter_context(ready_server(flags, system.module)) for _ in range(setting.engines)]
        if len(servers) == 1:
            yield servers[0]
        else:
            yield stack.enter_context(ready_server([server.url for server in servers], BALANCER))
