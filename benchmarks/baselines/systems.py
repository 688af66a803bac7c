"""The systems that are compared, by name, and how each is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.load.server import STENCIL, Server, ready_server

DIFFUSERS = "benchmarks.baselines.diffusers_server"

FIRST_BLOCK_CACHE = 0.5
"""Threshold of step skipping: the largest of 0.1, 0.2, .. 0.6 with a mean SSIM of at least 0.95 and a P10 of at least
0.9 in the mask's box on scenes set aside for tuning. `python -m benchmarks.quality systems --first-block-cache T`
measures both for another threshold. FlashPS tunes TeaCache likewise (section 6.1)."""


@dataclass(frozen=True)
class System:
    """label: in tables. module: run as the server. fields: of every edit. is_mask_aware: an edit's cost depends on its
    mask and on what was edited before.
    """

    label: str
    module: str
    flags: tuple[str, ...] = ()
    fields: Mapping[str, object] = field(default_factory=dict)
    is_mask_aware: bool = False


SYSTEMS = {
    "diffusers": System("diffusers, one at a time", DIFFUSERS),
    "diffusers-batch": System("diffusers, static batches of 8", DIFFUSERS, ("--batch-size", "8")),
    "diffusers-skip": System(
        "diffusers, static batches, first-block cache",
        DIFFUSERS,
        ("--batch-size", "8"),
        {"first_block_cache": FIRST_BLOCK_CACHE},
    ),
    "mask-aware-alone": System(
        "mask-aware, one at a time (FISEdit emulated)",
        STENCIL,
        ("--max-num-seqs", "1", "--router-policy", "least-requests"),
        is_mask_aware=True,
    ),
    "stencil-exact": System("Stencil, mask-aware off", STENCIL, ("--no-mask-aware",)),
    "stencil": System("Stencil", STENCIL, is_mask_aware=True),
}
"""FISEdit itself runs with Stable Diffusion 2.1 on GPUs before Hopper. Its way of serving is emulated: mask-aware, one
edit at a time, since it does not batch edits of different masks."""


@dataclass(frozen=True)
class Setting:
    """What all systems share. threads: torch threads of the worker."""

    model: str
    dtype: str = "float32"
    threads: int = 1

    @property
    def flags(self) -> list[str]:
        return ["--model", self.model, "--dtype", self.dtype, "--threads", str(self.threads)]


@contextmanager
def running(name: str, setting: Setting) -> Iterator[Server]:
    """The system, ready to serve."""
    system = SYSTEMS[name]
    queue = ["--max-queue", "4096"] if system.module == STENCIL else []
    with ready_server([*setting.flags, *system.flags, *queue], system.module) as server:
        yield server
