"""Latency of a lone edit by mask ratio, through HTTP: exact, warm and cold, and where the time goes.

Cold edits a picture that nobody has seen, so its pages are primed first. Exact computes every token of it. Warm edits
it again, when its pages are there. The three alternate, so that a busy moment of the machine meets all, each a moment
after the last one, when an idle server has primed the result of that.
The server is started with the flags given here, or is one that runs (`--base-url`). With `--once` there is an edit of
each kind and no other: for checkpoints whose edits take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.load.client import Target, connect, send_alone
from benchmarks.load.dataset import EditCall
from benchmarks.load.pictures import alpha_mask, encode, template
from benchmarks.load.server import ready_server
from benchmarks.load.workload import PROMPTS
from benchmarks.report import print_report
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL

KINDS = ("cold", "exact", "warm")
TOKEN = 16
"""Pixels per token side of FLUX."""

PAUSE_SECONDS = 0.4
"""Between two edits."""


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


@dataclass
class Measured:
    """All edits at one mask ratio and number of steps."""

    mask_ratio: float
    steps: int
    edits: dict[str, Edits] = field(default_factory=lambda: {kind: Edits() for kind in KINDS})


class Client:
    """Sends one edit at a time, of pictures of one size."""

    def __init__(self, url: str, http: httpx.AsyncClient, size: tuple[int, int]) -> None:
        self._target, self._exact = Target(url), Target(url, extra={"mask_aware": False})
        self._http = http
        self._size = size
        self._num_sent = 0
        self._num_pictures = 0

    async def edit(self, kind: str, mask: bytes, steps: int) -> tuple[float, dict[str, Any]]:
        """(seconds, the answer's `stencil`). Raises RuntimeError for a failure."""
        self._num_sent += 1
        self._num_pictures += kind == "cold"
        image = encode(template(self._num_pictures, self._size))
        call = EditCall(PROMPTS[0], steps, self._num_sent, image, mask, None)
        await asyncio.sleep(PAUSE_SECONDS)
        outcome = await send_alone(self._http, self._exact if kind == "exact" else self._target, call)
        if outcome.is_failed:
            raise RuntimeError(outcome.error)
        return outcome.latency, dict(outcome.facts)

    async def find_masks(self, ratios: Sequence[float]) -> dict[float, bytes]:
        """The square masks whose active tokens, margin included, come nearest to these shares of all."""
        found: dict[float, bytes] = {}
        least = int(0.5 * min(ratios) ** 0.5 * min(self._size)) // 8 * 8  # a mask touches more tokens than it covers
        for side in range(max(8, least), min(self._size), 8):
            mask = self.square_mask(side)
            _, facts = await self.edit("warm", mask, 1)
            found.setdefault(facts["mask_ratio"], mask)
            if facts["mask_ratio"] > max(ratios):
                break
        nearest = [min(found, key=lambda value: abs(value - ratio)) for ratio in ratios]
        return {ratio: found[ratio] for ratio in dict.fromkeys(nearest)}

    def square_mask(self, side: int) -> bytes:
        """Transparent in a square whose middle is the middle of a token."""
        width, height = self._size
        top, left = (max(0, length // 2 + TOKEN // 2 - side // 2) for length in (height, width))
        return encode(alpha_mask((left, top, min(width, left + side), min(height, top + side)), self._size))


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    with _server(args) as url:
        measured = asyncio.run(_measure(args, url))
    for one in measured:
        _report(args, one)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    if args.base_url:
        yield args.base_url
        return
    with ready_server(["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads)]) as server:
        yield server.url


async def _measure(args: argparse.Namespace, url: str) -> list[Measured]:
    async with connect(Target(url)) as http:
        client = Client(url, http, (args.size, args.size))
        if args.once:
            return [await _measure_once(args, client, steps) for steps in args.steps]
        masks = await client.find_masks(args.mask_ratio)
        return [await _measure_one(args, client, *mask, steps) for steps in args.steps for mask in masks.items()]


async def _measure_one(args: argparse.Namespace, client: Client, ratio: float, mask: bytes, steps: int) -> Measured:
    await _round(client, mask, Measured(ratio, steps))  # warm-up
    measured = Measured(ratio, steps)
    for _ in range(args.rounds):
        await _round(client, mask, measured)
    return measured


async def _measure_once(args: argparse.Namespace, client: Client, steps: int) -> Measured:
    measured = Measured(0.0, steps)
    await _round(client, client.square_mask(args.once), measured)
    return measured


async def _round(client: Client, mask: bytes, measured: Measured) -> None:
    for kind in KINDS:
        seconds, facts = await client.edit(kind, mask, measured.steps)
        expected = {"exact": "off", "warm": "hit", "cold": "miss"}[kind]
        if facts["cache"] != expected:
            raise RuntimeError(f"a {kind} edit was a cache {facts['cache']}")
        measured.mask_ratio = facts["mask_ratio"]
        measured.edits[kind].seconds.append(seconds)
        measured.edits[kind].ms.append(facts["ms"])


def _report(args: argparse.Namespace, measured: Measured) -> None:
    edits = measured.edits
    cold, exact, warm = (edits[kind].median for kind in KINDS)
    step_ratio = edits["warm"].part("denoise") / edits["exact"].part("denoise")
    rows = [(f"{kind}, median", _describe(edits[kind])) for kind in KINDS]
    rows += [
        ("warm against exact", f"{exact / warm:.2f}x faster"),
        ("cold against exact", f"{cold / exact:.2f} of its latency"),
        ("warm denoising against exact", f"{step_ratio:.3f} of its time"),
    ]
    rounds = len(edits["exact"].seconds)
    title = f"mask ratio {measured.mask_ratio:.3f}, {measured.steps} steps, {args.dtype}, {rounds} rounds"
    print_report(
        title,
        rows,
        {
            "benchmark": "latency",
            "mask_ratio": measured.mask_ratio,
            "steps": measured.steps,
            "dtype": args.dtype,
            "size": args.size,
            "exact_s": exact,
            "warm_s": warm,
            "cold_s": cold,
            "exact_denoise_s": edits["exact"].part("denoise") / 1e3,
            "warm_denoise_s": edits["warm"].part("denoise") / 1e3,
            "warm_speedup": exact / warm,
            "cold_ratio": cold / exact,
            "step_ratio": step_ratio,
        },
    )


def _describe(edits: Edits) -> str:
    parts = ", ".join(f"{name} {edits.part(name):.0f}" for name in edits.ms[0])
    rest = edits.median * 1e3 - sum(edits.part(name) for name in edits.ms[0])
    return f"{edits.median * 1e3:.0f} ms ({parts}, rest {rest:.0f})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", help="of a running server, which the next three flags then do not start")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the worker")
    parser.add_argument("--size", type=int, default=256, help="pixels of the pictures' sides")
    parser.add_argument("--mask-ratio", type=float, nargs="+", default=[0.1], help="active tokens over image tokens")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 28], help="denoising steps")
    parser.add_argument("--rounds", type=int, default=9, help="edits of each kind")
    parser.add_argument(
        "--once",
        type=int,
        default=0,
        metavar="SIDE",
        help="one edit of each kind, with a mask of so many pixels a side",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
