"""What an engine's coordinator costs by its number of ranks, after LegoDiffusion's section 7.5: 256 of them, 500
requests in flight, workflows of FLUX.1-dev's and Stable Diffusion 3.5's length.

The scheduler with its policy is that of the engine; time and ranks are simulated, step by step. What is counted is CPU
time: of its passes, of applying results, of reports and statistics, and of encoding and decoding all messages; neither
event loop nor sockets. As much simulated time passes, and what comes meanwhile waits for the next pass. The benchmark
prints CPU time per completed node (one of one request), and as shares: of one core's time, and of the time that ranks
execute. For each request that ends another one comes. Fewer ranks have as many fewer requests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import msgspec

from benchmarks.command import command
from benchmarks.report import Value, print_report
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS, make
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.lego.numbers import Numbers
from benchmarks.simulation.lego.serving import WorkflowDurations
from benchmarks.simulation.lego.site import Site
from core.config import SchedulerConfig
from core.costs.cost_model import CostModel
from core.handles import LoadedComponent
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, EngineRequest, Finished, Output, ToEngine
from core.messages.plan_parts import parts_of
from core.messages.worker import BatchResult, FromWorker, StepPlan
from core.scheduling.scheduler import StepScheduler
from engine.engine_core.engine_core import REPORT_SECONDS

SETTINGS = {"flux-d": "S4", "sd35l": "S2"}
"""Base model, whose workflow without ControlNets is served -> the paper's setting that has it."""

IN_FLIGHT = 500 / 256
"""Requests for each rank."""

FULL = 1.25
"""Times that a request alone takes, until ranks have what they have from then on."""

EVERY_STEP = 1000
"""Rounds of a request are its steps."""


class CountedScheduler(StepScheduler):
    """Counts the CPU time that it takes, with its messages: as EngineCore gives and takes them."""

    seconds = 0.0
    num_nodes = 0  # of requests, completed
    _to_engine: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
    _from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
    _num_reported = 0
    _reported = _stats_sent = -REPORT_SECONDS

    def add(self, head: EngineRequest) -> None:
        payload, start = encode(head), time.thread_time()
        message = self._to_engine.decode(payload)
        assert isinstance(message, EngineRequest)
        super().add(message)
        self.seconds += time.thread_time() - start

    def schedule(self, now: float, *, again: bool = False) -> StepPlan | None:
        start = time.thread_time()
        plan = super().schedule(now, again=again)
        if plan is not None:
            for part in parts_of(plan).values():
                encode(part)
        self.seconds += time.thread_time() - start
        return plan

    def apply(self, result: BatchResult) -> None:
        payload, start = encode(result), time.thread_time()
        message = self._from_worker.decode(payload)
        assert isinstance(message, BatchResult)
        super().apply(message)
        self.seconds += time.thread_time() - start
        self.num_nodes += len(result.items)

    def take_outputs(self) -> tuple[Output, ...]:
        start, now = time.thread_time(), self._now
        outputs, (num_running, _) = super().take_outputs(), self.counts
        if outputs or num_running != self._num_reported or now >= self._reported + REPORT_SECONDS:
            stats = None
            if now >= self._stats_sent + REPORT_SECONDS:
                stats, self._stats_sent = self.stats(), now
            encode(EngineOutputs(outputs=outputs, load=self.load_report(), stats=stats))
            self._num_reported, self._reported = num_running, now
        self.seconds += time.thread_time() - start
        return outputs


class Coordinator(SimulatedEngine):
    """Is busy for as long as its scheduler has taken, and then makes one pass for all that has come, as EngineCore."""

    scheduler: CountedScheduler
    _free_at = 0.0
    _counted = 0.0  # CPU seconds until the end of the last pass
    _is_due = False

    def step(self) -> None:
        if self._clock.now < self._free_at:
            if not self._is_due:
                self._is_due = True
                self._clock.at(self._free_at, self.step)
            return
        self._is_due = False
        super().step()
        self._free_at = self._clock.now + self.scheduler.seconds - self._counted
        self._counted = self.scheduler.seconds


class Measured(NamedTuple):
    """What was measured in an interval. seconds: CPU time of the coordinator. elapsed, busy:
    simulated seconds, and those that ranks executed, summed over them.
    """

    seconds: float
    num_nodes: int
    elapsed: float
    busy: float


def measure(base: str, num_ranks: int, lengths: float) -> Measured:
    """base: one of SETTINGS. lengths: of the interval, in times that a request alone takes."""
    numbers = msgspec.structs.replace(Numbers.read(), most_rounds=EVERY_STEP)
    site = Site(numbers, SETTINGS[base], num_ranks, most_nets=0)
    (workflow,) = (each for each in site.workflows if each.base == base)
    clock, cost, sizes, names = Clock(), CostModel(), site.sizes("node"), count()
    sized = [LoadedComponent(key, nbytes) for key, nbytes in sizes.items()]
    config = SchedulerConfig(max_num_seqs=4096, model_bytes=site.budget)
    scheduler = CountedScheduler(config, site.infos("node"), num_ranks, cost=cost, policy=make(OURS), sizes=sized)
    site.teach(cost, "node")
    scheduler.learn((), [(rank, sized) for rank in range(num_ranks)])

    def send() -> None:
        engine.add(msgspec.structs.replace(site.request(next(names), clock.now, workflow, "node"), objective=None))

    def note(outputs: tuple[Output, ...]) -> None:
        for _ in filter(lambda each: isinstance(each, Finished), outputs):
            clock.at(clock.now, send)

    durations = WorkflowDurations(numbers, defaultdict(lambda: workflow), sizes, numbers.jitter, 0)
    engine = Coordinator(clock, scheduler, durations, note)
    alone, number = numbers.alone_seconds(workflow), round(IN_FLIGHT * num_ranks)
    for index in range(number):
        clock.at(index / number * alone, send)
    marks = list[Measured]()

    def mark() -> None:
        busy = sum(engine.clocks.busy_seconds)
        marks.append(Measured(scheduler.seconds, scheduler.num_nodes, clock.now, busy))
        if len(marks) == 2:
            clock.stop()

    clock.at(FULL * alone, mark)
    clock.at((FULL + lengths) * alone, mark)
    clock.run()
    before, after = marks
    return Measured(
        after.seconds - before.seconds,
        after.num_nodes - before.num_nodes,
        after.elapsed - before.elapsed,
        after.busy - before.busy,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="numbers of ranks")
    parser.add_argument("--lengths", type=float, default=2.0, help="of what is measured, in times that a request takes")
    args = parser.parse_args(argv)
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "coordinator"})
    for base in SETTINGS:
        for ranks in args.ranks:
            found = measure(base, ranks, args.lengths)
            each, core = 1e6 * found.seconds / found.num_nodes, found.seconds / found.elapsed
            busy = found.seconds / found.busy
            text = f"{each:.0f} us a node, {core:.2%} of a core, {busy:.3%} of the ranks' time"
            rows.append((f"{base}, {ranks} ranks", f"{text}; {found.num_nodes / found.elapsed:.0f} nodes a second"))
            result |= {f"{base}_{ranks}_us": each, f"{base}_{ranks}_core": core, f"{base}_{ranks}_ranks": busy}
    print_report("CPU time of the coordinator", rows, result, args.output)


if __name__ == "__main__":
    main()
