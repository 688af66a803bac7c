"""One step whose pages come from a slow tier, under several plans of which blocks to compute in full.

FLUX-shaped blocks with random weights; of the two keyframes around the step one is in memory, the other is read by the
real page store from files slowed down to a tier's speed. As figure 4 (left) of FlashPS: load everything first, load
block by block while computing, the paper's Algorithm 1, our plan, and the ideal of nothing to load. Each with what
`finish_time` predicts from the times of the blocks. Pages of keys and values allow only leading full blocks, so
Algorithm 1's choice is predicted as it is, and run with the same number of full blocks at the front.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import torch

from benchmarks.command import command
from benchmarks.micro.denoiser_step import flux_shape, random_row
from benchmarks.micro.rows import pages_between, primed_entry
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from core.cache.block_plan import Times, plan_prefix
from core.handles import EntryRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import PageCopied, PageCopy
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.page_cache.page_files import Bytes, PageFiles
from model_executor.page_cache.page_store import OnBlock, PageStore

MASK_RATIO = 0.1

SLOWNESS = (0.5, 2.0, 5.0)
"""Loading of a block over computing it with pages: three tiers."""


def finish_time(cached: Sequence[bool], compute_full: Times, compute_cached: Times, load: Times) -> float:
    """When the last block is done. cached: whether each block uses its pages. Times: by block."""
    loaded = done = 0.0
    for is_cached, full, active, loading in zip(cached, compute_full, compute_cached, load, strict=True):
        if is_cached:
            loaded += loading
            done = max(loaded, done) + active
        else:
            done += full
    return done


def algorithm_1(compute_full: Times, compute_cached: Times, load: Times) -> tuple[bool, ...]:
    """The rule of FlashPS (section 4.2, Algorithm 1): block after block, use the pages if that block then ends no later
    than computed in full. There the blocks are equal, here they need not be."""
    loaded = done = 0.0
    cached = []
    for full, active, loading in zip(compute_full, compute_cached, load, strict=True):
        end = max(loaded + loading, done) + active
        cached.append(end <= done + full)
        if cached[-1]:
            loaded, done = loaded + loading, end
        else:
            done += full
    return tuple(cached)


class SlowFiles(PageFiles):
    """Files of a tier that takes `seconds_per_block` for each block."""

    seconds_per_block = 0.0

    def read(self, key: str, out: Bytes, block_bytes: int, on_block: OnBlock, order: Iterable[int] = ()) -> bool:
        due = time.perf_counter()

        def announce(block: int) -> None:
            nonlocal due
            due += self.seconds_per_block
            time.sleep(max(0.0, due - time.perf_counter()))
            on_block(block)

        return super().read(key, out, block_bytes, announce, order)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds by block, and of what a step does besides its blocks."""

    full: list[float]
    cached: list[float]
    rest: float

    def end(self, cached: Sequence[bool], load: Sequence[float]) -> float:
        return finish_time(cached, self.full, self.cached, load) + self.rest


class Step:
    """One edit's step: one keyframe's pages in memory, the other's loaded from the slow tier on request."""

    def __init__(self, directory: Path) -> None:
        shape = flux_shape()
        module = shape.module.eval().requires_grad_(False)
        self._num_double = module.config.num_layers
        self._transformer = FluxTransformer(module, 1000)
        self.layout = self._transformer.page_layout("int8")
        self._num_tokens, row = shape.image_tokens, random_row(self._transformer, shape)
        self._row = replace(row, active=torch.arange(round(MASK_RATIO * shape.image_tokens)))
        near, far = (primed_entry(self._transformer, row, sigma) for sigma in (0.75, 0.5))
        arena = Arena.create(1, -(-2 * len(far) // 4096) * 4096)
        self._far = EntryRef("far", len(far), ArenaAllocator(arena).alloc(len(far)))
        self._files = SlowFiles(directory, 2 * len(far))
        self._copied: SimpleQueue[PageCopied] = SimpleQueue()
        self.store = PageStore(torch.device("cpu"), arena, self._files, self._copied.put)
        self._files.write("far", far.numpy(), self.block_bytes)
        self.store.create(self._far).copy_(far)
        self._pages = pages_between(self._transformer, row, near, self.store.entry(self._far))

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes(self._num_tokens)

    def in_memory(self, num_full: int = 0) -> float:
        """Seconds of the step with nothing to load."""
        return timed(lambda: self._forward(num_full, None))()

    def loading(self, num_full: int, seconds_per_block: float, *, wait_for_all: bool = False) -> float:
        """Seconds of the step from the start of its loads."""
        self._files.seconds_per_block = seconds_per_block
        if num_full == self.layout.num_blocks:
            return self.in_memory(num_full)

        far = self._far
        copy = PageCopy(far.key, far.nbytes, self.block_bytes, "disk", "host", far.host)

        def step() -> None:
            self.store.start(copy)
            self.store.put_last(copy.key, range(num_full))
            if wait_for_all:
                for block in range(self.layout.num_blocks):
                    self._wait(block)
            self._forward(num_full, self._wait)

        seconds = timed(step)()
        assert self._copied.get().ok
        return seconds

    def block_times(self, rounds: int) -> BlockTimes:
        """Medians. A cached block takes from its access to the pages to the next block's; the extra time of a full one
        is measured by steps with all double blocks, and with all blocks, in full."""
        num_double, num_blocks = self._num_double, self.layout.num_blocks
        intervals = [self._intervals() for _ in range(rounds)]
        double = statistics.median(t for one in intervals for t in one[: num_double - 1])
        single = statistics.median(t for one in intervals for t in one[num_double:])
        ends = {full: partial(self.in_memory, full) for full in (0, num_double, num_blocks)}
        none, doubles, every = medians(ends, rounds).values()
        more_double, more_single = (doubles - none) / num_double, (every - doubles) / (num_blocks - num_double)
        cached = [double] * num_double + [single] * (num_blocks - num_double)
        more = [more_double] * num_double + [more_single] * (num_blocks - num_double)
        return BlockTimes([c + m for c, m in zip(cached, more, strict=True)], cached, none - sum(cached))

    def _intervals(self) -> list[float]:
        """Seconds from each block's access to its pages to the next one's."""
        looks: list[float] = []
        self._forward(0, lambda block: looks.append(time.perf_counter()))
        return [end - start for start, end in pairwise(looks)]

    def _wait(self, block: int) -> None:
        self.store.wait_block(self._far.key, block)

    def _forward(self, num_full: int, wait: Callable[[int], None] | None) -> None:
        pages = replace(self._pages, wait=wait)
        self._transformer.forward([replace(self._row, pages=pages, full_blocks=range(num_full))])


def main(argv: Sequence[str] | None = None) -> None:
    args = command(__doc__, rounds=7).parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        step = Step(Path(directory))
        with closing(step.store):
            step.in_memory()
            times = step.block_times(args.rounds)
            for slowness in SLOWNESS:
                _measure(step, times, slowness, args.rounds, args.output)


@dataclass(frozen=True)
class Way:
    """name: in JSON. label: in tables. run: a step, in seconds. predicted: its seconds."""

    name: str
    label: str
    run: Callable[[], float]
    predicted: float


def _ways(step: Step, times: BlockTimes, seconds_per_block: float) -> list[Way]:
    number = step.layout.num_blocks
    load, nothing, cached = [seconds_per_block] * number, [0.0] * number, (True,) * number
    papers, ours = algorithm_1(times.full, times.cached, load), plan_prefix(times.full, times.cached, load)
    in_full, prefix = papers.count(False), (False,) * ours + cached[ours:]
    run = partial(step.loading, seconds_per_block=seconds_per_block)
    naive = sum(load) + times.end(cached, nothing)
    return [
        Way("naive", "load, then compute", partial(run, 0, wait_for_all=True), naive),
        Way("pipeline", "block by block", partial(run, 0), times.end(cached, load)),
        Way("algorithm_1", f"Algorithm 1, {in_full} full", partial(run, in_full), times.end(papers, load)),
        Way("ours", f"ours, {ours} full", partial(run, ours), times.end(prefix, load)),
        Way("ideal", "nothing to load", step.in_memory, times.end(cached, nothing)),
    ]


def _measure(step: Step, times: BlockTimes, slowness: float, rounds: int, output: Path | None) -> None:
    """All ways of a step over one tier, in turns."""
    seconds_per_block = slowness * statistics.mean(times.cached)
    speed = step.block_bytes / seconds_per_block / 1e6
    ways = _ways(step, times, seconds_per_block)
    seconds = medians({way.name: way.run for way in ways}, rounds)
    ideal, rows = seconds["ideal"], list[tuple[str, str]]()
    result: dict[str, Value] = {"benchmark": "block_plan", "MB_per_s": speed, "load_over_cached": slowness}
    for way in ways:
        taken, predicted = seconds[way.name] * 1e3, way.predicted * 1e3
        compared = f"{taken:7.1f} ms   predicted {predicted:7.1f}   {taken / ideal / 1e3:5.2f}x the ideal"
        rows.append((way.label, compared))
        result |= {f"{way.name}_ms": taken, f"{way.name}_predicted_ms": predicted}
    title = f"Tier of {speed:.0f} MB/s: a block loads in {slowness} times its computing; {MASK_RATIO:.0%} active tokens"
    print_report(title, rows, result, output)


if __name__ == "__main__":
    main()
