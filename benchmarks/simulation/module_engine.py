"""Serves a ModuleTrace in simulated time, with the scheduler and the policies of the engine.

The machine is as in the published measurements: one device, and the modules in processes of their own. Here the module
of the loop is on rank 0, the others on rank 1 (but for former step_batching, which encodes on rank 0), and the two do
not slow each other. The policies before `default` are built for this machine; `default` is told which components each
rank has. Every batch takes OVERHEAD longer than in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from benchmarks.baselines.clockwork import Clockwork
from benchmarks.baselines.former.goodput import Goodput
from benchmarks.baselines.former.step_batching import StepBatching
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.durations import Latencies, TableDurations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.module_trace import Cell, ModuleTrace
from benchmarks.simulation.recorder import BatchNote, Recorder
from benchmarks.simulation.scenario import MODEL, PIXELS
from core.config import SchedulerConfig
from core.costs.latency_table import LatencyTable
from core.costs.profile import Profile
from core.graph.op import OPS, OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Edge, Node, Region, Workflow
from core.handles import ArrayRef, Artefact, LoadedComponent, ModelKey
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.message import Message
from core.messages.specs import EditSpec
from core.messages.worker import CostSample
from core.sampling_params import SamplingParams
from core.scheduling.dispatch import Loads
from core.scheduling.node_cache import NodePages
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.policies import make_policy, policy_class
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler

NUM_RANKS = 2

OVERHEAD = 0.036
"""Share of time that NeuStream spends on scheduling (1.02 %) and communication (2.6 %): its table 2."""

TOKENS = 256
"""Of every request: the tables are for one size of picture."""


def resident(kind: type[SchedulingPolicy]) -> SchedulingPolicy:
    """A policy of this kind that loads nothing: each rank keeps what it has."""
    made: SchedulingPolicy = type("Resident", (kind,), {"loads": lambda self, demand, now: Loads()})()
    return made


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "neustream": lambda: make_policy("neustream"),
    "clockwork": lambda: Clockwork(equal_steps=True, num_ranks=1),
    "clockwork_ideal": lambda: Clockwork(num_ranks=1),
    "former step_batching": StepBatching,
    "former goodput": lambda: Goodput(steps_apart=True),
    OURS: lambda: resident(policy_class(OURS)),
}
"""What is compared, by name."""

RESIDENT = frozenset({OURS})
"""Those that are told what ranks have; for the others all ranks have everything."""

STATIC = frozenset({"neustream", "clockwork", "clockwork_ideal"})
"""Those that predict from the tables alone, as their published programs do; the others learn from every batch."""


LOOP, OTHERS = ModelKey(MODEL.name, "transformer"), ModelKey(MODEL.name, "vae")
"""The components of rank 0, and of rank 1."""


class ModuleWork(Message, OpWork, frozen=True):
    """Stands for a module's work; nothing is computed."""


@dataclass(frozen=True)
class Served:
    """What one policy made of one cell."""

    goodput: int  # requests done in time
    batches: list[BatchNote]  # modules are ops


def serve(trace: ModuleTrace, cell: Cell, policy: str, overhead: float = OVERHEAD) -> Served:
    """Run a cell's requests under a policy of POLICIES. overhead: of all batches. Raises
    KeyError if the trace lacks the cell's arrivals."""
    clock = Clock()
    workflow = register(trace)
    scheduler = _scheduler(trace, workflow, policy)
    due: dict[str, float] = {}
    in_time = list[str]()

    def note(outputs: tuple[Output, ...]) -> None:
        in_time.extend(
            each.request_id for each in outputs if isinstance(each, Finished) and clock.now <= due[each.request_id]
        )

    recorder = Recorder(clock)
    tables = Latencies(
        {
            (name, 1): {float(size): (1 + overhead) * seconds for size, seconds in table.items()}
            for name, table in trace.modules.items()
        }
    )
    engine = SimulatedEngine(clock, scheduler, TableDurations(tables), note, recorder)
    for request in requests_of(trace, cell, workflow):
        assert request.objective is not None
        due[request.request_id] = request.objective
        clock.at(request.arrival, lambda request=request: engine.add(request))  # type: ignore[misc]
    clock.run()
    assert not scheduler.num_requests, "requests are left"
    return Served(len(in_time), recorder.batches)


# ------------------------------------------------------------------------------------------------------ the pipeline


def register(trace: ModuleTrace) -> Workflow:
    """The modules as ops of this process, and the workflow of a request."""
    for name in trace.modules:
        if name not in OPS:
            OPS.register(_op(name, is_loop=name == trace.loop))
    nodes, before = list[Node](), ""
    for name in trace.modules:
        region = name if name == trace.loop else ""
        inputs = (Edge(before, "made", "read", carried=name if region else ""),) if before else ()
        nodes.append(Node(name, name, inputs, region=region))
        before = name
    return Workflow(trace.model, tuple(nodes), {"picture": before}, (Region(trace.loop),))


def _op(name: str, *, is_loop: bool) -> RequestOp:
    return RequestOp(
        name=name,
        component=(LOOP if is_loop else OTHERS).component,
        message=ModuleWork,
        size=_size,
        part="denoise" if is_loop else "decode",
        sharing="together" if is_loop else "single",
        inputs=(Port("read", "any", is_optional=True),),
        outputs=(Port("made", "any"),),
        make=_make,
    )


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> ModuleWork:
    return ModuleWork()


# ------------------------------------------------------------------------------------------------------ the engine


def _scheduler(trace: ModuleTrace, workflow: Workflow, policy: str) -> StepScheduler:
    """It knows the tables, and lines that were fitted to them."""
    largest = max(trace.latency_seconds[trace.loop])
    # step_batching has as many slots as the largest batch measured; the others keep more requests begun.
    slots = largest if policy == "former step_batching" else 4 * largest
    config = SchedulerConfig(max_num_seqs=slots, max_plans_in_flight=1, max_num_batched_tokens=2**31 - 1)
    cost = FrozenCosts()
    is_resident = policy in RESIDENT
    info = msgspec.structs.replace(MODEL, components=(LOOP, OTHERS)) if is_resident else MODEL
    scheduler = StepScheduler(config, {MODEL.name: info}, NUM_RANKS, cost=cost, policy=POLICIES[policy]())
    scheduler.workflows[workflow.name] = workflow
    on_ranks = [(rank, (LoadedComponent(key, 1),)) for rank, key in enumerate((LOOP, OTHERS))]
    scheduler.learn(_samples(trace), on_ranks if is_resident else ())
    cost.is_frozen = policy in STATIC
    for name, table in trace.modules.items():
        measured = LatencyTable((number, float(TOKENS), seconds) for number, seconds in table.items())
        scheduler.cost.add_profile(scheduler.cost_key(MODEL.name, name), Profile(measured))
    return scheduler


def _samples(trace: ModuleTrace) -> Iterator[CostSample]:
    for name, table in trace.modules.items():
        for number, seconds in table.items():
            yield CostSample(MODEL.name, name, Work.of([TOKENS] * number), seconds)


def requests_of(trace: ModuleTrace, cell: Cell, workflow: Workflow) -> Iterator[EngineRequest]:
    """The requests of a cell in the order in which they come."""
    for index, (arrival, steps) in enumerate(zip(trace.arrivals(cell), trace.steps, strict=True)):
        yield EngineRequest(
            request_id=str(index),
            model=MODEL.name,
            arrival=arrival,
            objective=arrival + cell.slo * trace.alone_seconds(steps),
            workflow=workflow.name,
            rounds=(steps,),
            spec=EditSpec(
                prompt="",
                sampling=SamplingParams(num_inference_steps=1, guidance_scale=1.0, seed=0),
                width=256,
                height=256,
                template=PIXELS,
                mask=PIXELS,
                active=ArrayRef(0, 0, (TOKENS,), "int32"),
                content_id="",
                num_tokens=TOKENS,
                max_text_tokens=0,
                outputs={"picture": Artefact(PIXELS)},
            ),
        )
