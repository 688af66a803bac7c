"""Latency of a lone edit by mask ratio, through HTTP: exact, warm and cold, and where the time goes.

A cold edit is the first of its picture, so pages are primed first. An exact one computes every token of all steps. A
warm edit of the same picture and mask finds its pages, and what the cold one encoded. The three alternate, with a pause
in which an idle server primes its last result. The server is started with the flags given here, or is a running one
(`--base-url`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx

from benchmarks.command import command, model_flags
from benchmarks.load.client import Target, connect, send_alone
from benchmarks.load.dataset import EditCall
from benchmarks.load.pictures import alpha_mask, encode, template
from benchmarks.load.server import ready_server
from benchmarks.load.workload import prompt
from benchmarks.report import print_report
from core.config import EMBEDDED_MODEL
from core.step_schedule import StepScheduleName

KINDS = {"cold": "miss", "exact": "off", "warm": "hit"}  # kind of edit -> what its answer says of the cache
TOKEN = 16  # pixels per token side of FLUX
PAUSE_SECONDS = 0.4  # between two edits


@dataclass
class Edits:
    """One kind of edit: seconds at the client, and each answer's own figures."""

    seconds: list[float] = field(default_factory=list)
    ms: list[dict[str, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """Median milliseconds of one part."""
        return statistics.median(ms[name] for ms in self.ms)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {self.part(name):.0f}" for name in self.ms[0])
        rest = self.median * 1e3 - sum(self.part(name) for name in self.ms[0])
        return f"{self.median * 1e3:.0f} ms ({parts}, rest {rest:.0f})"


@dataclass
class Measured:
    """All edits at one mask ratio and number of steps."""

    steps: int
    mask_ratio: float = 0.0
    edits: dict[str, Edits] = field(default_factory=lambda: {kind: Edits() for kind in KINDS})


class Client:
    """Sends one edit at a time, of square pictures of one size."""

    def __init__(self, url: str, http: httpx.AsyncClient, side: int, step_schedule: str) -> None:
        """step_schedule: of cold and warm edits."""
        self._target = Target(url, extra={"step_schedule": step_schedule})
        self._exact = Target(url, extra={"mask_aware": False})
        self._http = http
        self._side = side
        self._num_sent = 0
        self._num_pictures = 0

    async def edit(self, kind: str, mask: bytes, steps: int) -> tuple[float, dict[str, Any]]:
        """(seconds, the answer's `stencil`). Raises RuntimeError for a failure."""
        self._num_sent += 1
        self._num_pictures += kind == "cold"
        image = encode(template(self._num_pictures, (self._side, self._side)))
        call = EditCall(prompt(0), steps, self._num_sent, image, mask, None)
        await asyncio.sleep(PAUSE_SECONDS)
        outcome = await send_alone(self._http, self._exact if kind == "exact" else self._target, call)
        if outcome.is_failed:
            raise RuntimeError(outcome.error)
        return outcome.latency, dict(outcome.facts)

    async def find_masks(self, ratios: Sequence[float]) -> list[bytes]:
        """The square masks whose active tokens, margin included, come nearest to these shares of all."""
        found: dict[float, bytes] = {}
        least = int(0.5 * min(ratios) ** 0.5 * self._side) // 8 * 8  # a mask touches more tokens than it covers
        for side in range(max(8, least), self._side, 8):
            first = max(0, self._side // 2 + TOKEN // 2 - side // 2)  # the square's middle is the middle of a token
            last = min(self._side, first + side)
            mask = encode(alpha_mask((first, first, last, last), (self._side, self._side)))
            _, facts = await self.edit("warm", mask, 1)
            found.setdefault(facts["mask_ratio"], mask)
            if facts["mask_ratio"] > max(ratios):
                break
        nearest = [min(found, key=lambda value: abs(value - ratio)) for ratio in ratios]
        return [found[ratio] for ratio in dict.fromkeys(nearest)]

    async def round(self, mask: bytes, measured: Measured) -> None:
        """One edit of each kind."""
        for kind, expected in KINDS.items():
            seconds, facts = await self.edit(kind, mask, measured.steps)
            if facts["cache"] not in (expected, "own"):
                raise RuntimeError(f"a {kind} edit was a cache {facts['cache']}")
            measured.mask_ratio = facts["mask_ratio"]
            measured.edits[kind].seconds.append(seconds)
            measured.edits[kind].ms.append(facts["ms"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, rounds=9)
    parser.add_argument("--base-url", help="of a running server; none is started then")
    parser.add_argument("--size", type=int, default=256, help="pixels of the pictures' sides")
    parser.add_argument("--mask-ratio", type=float, nargs="+", default=[0.1], help="active tokens over image tokens")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 28], help="denoising steps")
    parser.add_argument(
        "--step-schedule", default="full", choices=get_args(StepScheduleName), help="of cold and warm edits"
    )
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        url = args.base_url or stack.enter_context(ready_server(model_flags(args))).url
        for measured in asyncio.run(_measure(args, url)):
            _report(args, measured)


async def _measure(args: argparse.Namespace, url: str) -> list[Measured]:
    async with connect(Target(url)) as http:
        client = Client(url, http, args.size, args.step_schedule)
        masks, every = await client.find_masks(args.mask_ratio), list[Measured]()
        for mask, steps in [(mask, steps) for steps in args.steps for mask in masks]:
            await client.round(mask, Measured(steps))  # warm-up
            every.append(Measured(steps))
            for _ in range(args.rounds):
                await client.round(mask, every[-1])
        return every


def _report(args: argparse.Namespace, measured: Measured) -> None:
    edits = measured.edits
    cold, exact, warm = (edits[kind].median for kind in KINDS)
    exact_denoise, warm_denoise = (edits[kind].part("denoise") / 1e3 for kind in ("exact", "warm"))
    rows = [(f"{kind}, median", str(edits[kind])) for kind in KINDS]
    rows += [
        ("warm against exact", f"{exact / warm:.2f}x faster"),
        ("cold against exact", f"{cold / exact:.2f} of its latency"),
        ("warm denoising against exact", f"{warm_denoise / exact_denoise:.3f} of its time"),
    ]
    result = {"benchmark": "latency", "mask_ratio": measured.mask_ratio, "steps": measured.steps}
    result |= {"step_schedule": args.step_schedule, "dtype": args.dtype, "size": args.size}
    result |= {"exact_s": exact, "warm_s": warm, "cold_s": cold}
    result |= {"exact_denoise_s": exact_denoise, "warm_denoise_s": warm_denoise}
    result |= {"warm_speedup": exact / warm, "cold_ratio": cold / exact, "step_ratio": warm_denoise / exact_denoise}
    rounds = len(edits["exact"].seconds)
    steps = f"{measured.steps} steps ({args.step_schedule})"
    title = f"mask ratio {measured.mask_ratio:.3f}, {steps}, {args.dtype}, {rounds} rounds"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
