"""One denoising step computed by several ranks together, against one rank: by number of tokens, and of rows, such as
the two of a request with classifier-free guidance, or a batch of edits.

FLUX-shaped blocks of random weights (hidden size 512, 4 + 8 of them), exact, in as many processes as the largest degree
has. One rank and the group take turns; figures are medians over rounds, and the bits must be equal. `exchanged`: the
share of the group's time in which its first rank exchanges, waits for the other included. The bound of the speed is the
degree, since all ranks share out the same operations.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from benchmarks.command import command
from benchmarks.micro.denoiser_step import FLUX_SHAPE
from benchmarks.micro.rows import transformer_row
from benchmarks.report import Value, print_report
from benchmarks.turns import in_turns
from model_executor.models.base import Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.parallel.group import Group
from model_executor.parallel.groups import Groups
from model_executor.parallel.rows import are_even, predict_rows

SIDES = (8, 16, 23, 32, 64)
"""Of pictures, in tokens."""
BATCH_SIDES = (8, 16, 32)
"""With --rows."""
TEXT_TOKENS = 64
TIMEOUT = 1800.0
"""Seconds: some ranks wait while others measure groups that these are not in."""


@dataclass(frozen=True)
class Case:
    """The rows of a step, all of one size."""

    side: int
    num_rows: int

    @property
    def name(self) -> str:
        rows = f", {self.num_rows} rows" if self.num_rows > 1 else ""
        return f"{self.side**2} tokens{rows}"

    @property
    def operations(self) -> int:
        """Floating point operations of the step's blocks: 24 H^2 a token in the linear layers of a block of either
        kind, and 4 H for each pair of tokens in its attention."""
        hidden: int = FLUX_SHAPE["num_attention_heads"] * FLUX_SHAPE["attention_head_dim"]
        blocks: int = FLUX_SHAPE["num_layers"] + FLUX_SHAPE["num_single_layers"]
        tokens = self.side**2 + TEXT_TOKENS
        return self.num_rows * blocks * (24 * hidden**2 * tokens + 4 * hidden * tokens**2)


CASES = [*(Case(side, 1) for side in SIDES), Case(32, 2)]


@dataclass(frozen=True)
class Measured:
    """Seconds by round, alone and together; the share of the latter spent exchanging; bytes sent by this rank."""

    alone: Sequence[float]
    together: Sequence[float]
    exchanged: float
    sent: int
    is_equal: bool


class CountingGroup(Group):
    """Counts the time and the bytes of its exchanges."""

    def __init__(self, group: Group) -> None:
        super().__init__(group._process_group, group.me, group.degree, group._device)
        self.seconds, self.sent = 0.0, 0

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        started = time.perf_counter()
        received = super().exchange(parts, shapes)
        self.seconds += time.perf_counter() - started
        self.sent += sum(part.nbytes for member, part in enumerate(parts) if member != self.me)
        return received


class Bench:
    """One rank's denoiser and rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        module: Any = FluxTransformer2DModel(**FLUX_SHAPE).to(dtype).eval().requires_grad_(False)
        self._denoiser, self._dtype = FluxTransformer(module, 1000), dtype

    def rows(self, case: Case) -> list[Row]:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(case.side))
        return [
            transformer_row(self._denoiser, case.side, TEXT_TOKENS, lambda *size: draw(size).to(self._dtype))
            for _ in range(case.num_rows)
        ]

    def step(self, rows: Sequence[Row], group: Group | None) -> list[Tensor]:
        """As a family does it."""
        if group is not None and are_even(rows, group.degree):
            return predict_rows(rows, group, self._denoiser.forward, self._dtype)
        return self._denoiser.forward(rows, group)

    def measure(self, case: Case, group: CountingGroup, rounds: int) -> Measured:
        """To be called by all ranks of the group. While the first one computes alone, the others wait for it."""
        rows = self.rows(case)
        ways: dict[str, Callable[[], float]] = {
            "alone": lambda: _timed(group, lambda: self.step(rows, None) if group.me == 0 else None),
            "together": lambda: _timed(group, lambda: self.step(rows, group)),
        }
        is_equal = all(map(torch.equal, self.step(rows, None), self.step(rows, group)))
        in_turns(ways, 1)
        group.seconds, group.sent = 0.0, 0
        self.step(rows, group)
        seconds, sent = group.seconds, group.sent
        figures = in_turns(ways, rounds, warm_ups=0)
        exchanged = seconds / statistics.median(figures["together"])
        return Measured(figures["alone"], figures["together"], exchanged, sent, is_equal)


def _timed(group: Group, call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin together."""
    Group.gather(group, torch.zeros(1), [1] * group.degree)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run_rank(
    rank: int, pipe: Connection, dtype: str, threads: int, degrees: Sequence[int], rounds: int, cases: Sequence[Case]
) -> None:
    """Entry point of a rank's process; the first one sends what it has measured."""
    torch.set_num_threads(threads)
    groups = Groups(rank, TIMEOUT)
    pipe.send(groups.port)
    ports = pipe.recv()
    with torch.inference_mode():
        bench = Bench(getattr(torch, dtype))
        for degree in degrees:
            ranks = tuple(range(degree))
            for case in cases if rank in ranks else ():
                measured = bench.measure(case, CountingGroup(groups.of(ranks, 0, ports[0])), rounds)
                if rank == 0:
                    pipe.send((degree, case, measured))
    pipe.send(None)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parser = command(__doc__, dtype="float32", threads=1, rounds=5)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--rows", type=int, nargs="+", help="tokens by so many rows, in place of the usual cases")
    args = parser.parse_args(argv)
    print_measured(list(measure(args)), args)


def measure(args: argparse.Namespace) -> Sequence[tuple[int, Case, Measured]]:
    """(degree, case, figures) of all."""
    processes = get_context("spawn")
    pipes = [processes.Pipe() for _ in range(max(args.degrees))]
    cases = [Case(side, number) for side in BATCH_SIDES for number in args.rows] if args.rows else CASES
    settings = args.dtype, args.threads, args.degrees, args.rounds, cases
    ranks = [
        processes.Process(target=run_rank, args=(rank, theirs, *settings), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    ports = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(ports)
    found = list(iter(pipes[0][0].recv, None))
    for process in ranks:
        process.join()
    return found


def print_measured(found: Sequence[tuple[int, Case, Measured]], args: argparse.Namespace) -> None:
    rows, result = [], dict[str, Value](benchmark="parallel_step", dtype=args.dtype, threads=args.threads)
    for degree, case, measured in found:
        assert measured.is_equal, f"{case.name} at degree {degree} has other bits than at degree 1"
        alone, together = statistics.median(measured.alone), statistics.median(measured.together)
        speed = statistics.median(a / b for a, b in zip(measured.alone, measured.together, strict=True))
        rows.append(
            (
                f"{case.name}, degree {degree}",
                f"{alone * 1e3:7.1f} ms alone, {together * 1e3:7.1f} ms together: {speed:4.2f}x; exchanged "
                f"{measured.exchanged:4.0%} of it, {measured.sent / 1e6:6.2f} MB; "
                f"{case.operations / 1e9:4.0f} GFLOP, {case.operations / together / 1e9:4.0f} GFLOP/s",
            )
        )
        key = f"{case.side**2}_tokens_{case.num_rows}_rows_degree_{degree}"
        result |= {f"{key}_speed": speed, f"{key}_exchanged": measured.exchanged, f"{key}_sent_bytes": measured.sent}
        result |= {f"{key}_flop": case.operations, f"{key}_flop_per_s": case.operations / together}
    title = f"A step of FLUX-shaped blocks on several ranks, {args.threads} thread(s) each, {args.dtype}"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
