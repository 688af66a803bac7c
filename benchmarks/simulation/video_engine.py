"""Serves videos in simulated time on many devices, with the scheduler and the policies of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.baselines.clusters import by_class, isolated, static
from benchmarks.baselines.former.elastic import Elastic
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS, make
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.scenario import MODEL, PIXELS
from benchmarks.simulation.video_load import TOKENS, Arrival, VideoLoad
from core.config import SchedulerConfig
from core.costs.useful_degree import useful_degree
from core.graph.op import OPS, OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Edge, Node, Region, Workflow
from core.handles import ArrayRef, Artefact
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.message import Message
from core.messages.specs import EditSpec
from core.messages.worker import Batch, CostSample, Transfer
from core.sampling_params import SamplingParams
from core.scheduling.node_cache import NodePages
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.policies import make_policy
from core.scheduling.policies.papers.ddit import Ddit
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler

TRANSFER_SECONDS = 0.001
"""Of a request's state to other devices: "less than 1 millisecond" (DDiT, section 6.3)."""

CLASS_OF = {tokens: name for name, tokens in TOKENS.items()}
SIZES = tuple(TOKENS.values())


@dataclass(frozen=True)
class Site:
    """What a policy is made for."""

    load: VideoLoad
    num_ranks: int
    mix: Sequence[float]

    @property
    def useful(self) -> list[int]:
        """B of each class."""
        return [useful_degree({d: 1 / s for d, s in self.load.speed[name].items()}) for name in TOKENS]


POLICIES: dict[str, Callable[[Site], SchedulingPolicy]] = {
    "SDoP 1": lambda site: static(site.num_ranks, 1, SIZES),
    "SDoP 2": lambda site: static(site.num_ranks, 2, SIZES),
    "SDoP 4": lambda site: static(site.num_ranks, 4, SIZES),
    "SDoP 2 decoupled": lambda site: static(site.num_ranks, 2, SIZES, decouples=True),
    "SPCI": lambda site: isolated(site.num_ranks, 4, SIZES, site.mix),
    "DPCI": lambda site: by_class(site.num_ranks, site.useful, SIZES, is_isolated=True),
    "DP": lambda site: by_class(site.num_ranks, site.useful, SIZES, is_isolated=False),
    "ddit": lambda site: make_policy("ddit"),
    "ddit, no promotion": lambda site: Ddit(promotes=False),
    "former elastic": lambda site: Elastic(),
    OURS: lambda site: make(OURS),
}
"""What is compared, by name."""

CHANGES_RANKS = frozenset({"ddit", "ddit, no promotion", "former elastic", OURS})
"""Those that decide between steps; for the others all steps of a request are one."""


@dataclass(frozen=True)
class Served:
    """What one policy made of one list of arrivals."""

    latencies: list[float]  # seconds, in the order of the arrivals
    device_seconds: float  # for which devices were computing


class VideoWork(Message, OpWork, frozen=True):
    """Stands for a step, or for decoding; nothing is computed."""


@dataclass(frozen=True)
class VideoDurations(Durations):
    """Of requests whose steps are counted as `steps`. Items of a batch run one after the other (insight 1 of DDiT)."""

    load: VideoLoad
    steps: int

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        return sum(self.of(batch.op, CLASS_OF[tokens], len(batch.ranks)) for tokens in work.queries)

    def of(self, op: str, name: str, degree: int) -> float:
        """Of one item."""
        if op == "video_decode":
            return self.load.decode_seconds(name)
        return self.load.step_seconds(name, degree) * self.load.steps / self.steps

    def transfer_seconds(self, transfer: Transfer) -> float:
        return TRANSFER_SECONDS


def serve(load: VideoLoad, mix: Sequence[float], arrivals: Sequence[Arrival], policy: str, num_ranks: int) -> Served:
    """Run requests under a policy of POLICIES."""
    clock, workflow = Clock(), register()
    durations = VideoDurations(load, load.steps if policy in CHANGES_RANKS else 1)
    config = SchedulerConfig(
        max_num_seqs=min(4096, max(1, len(arrivals))), max_plans_in_flight=1, max_num_batched_tokens=2**31 - 1
    )
    cost, made = FrozenCosts(), POLICIES[policy](Site(load, num_ranks, mix))
    scheduler = StepScheduler(config, {MODEL.name: MODEL}, num_ranks, cost=cost, policy=made)
    scheduler.workflows[workflow.name] = workflow
    scheduler.learn(_samples(durations))
    cost.is_frozen = True
    ends: dict[str, float] = {}

    def note(outputs: tuple[Output, ...]) -> None:
        assert all(isinstance(each, Finished) for each in outputs), "a request has failed"
        ends.update((each.request_id, clock.now) for each in outputs)

    engine = SimulatedEngine(clock, scheduler, durations, note)
    for index, arrival in enumerate(arrivals):
        clock.at(arrival.seconds, partial(engine.add, _request(str(index), arrival, workflow, durations.steps)))
    clock.run()
    assert len(ends) == len(arrivals), "requests are left"
    latencies = [ends[str(index)] - arrival.seconds for index, arrival in enumerate(arrivals)]
    return Served(latencies, sum(engine.clocks.busy_seconds))


# ------------------------------------------------------------------------------------------------------ the pipeline


def register() -> Workflow:
    """The ops, in this process, and the workflow of a request: steps, then decoding. Text encoding takes no time
    (section 4.3).
    """
    for name in ("video_step", "video_decode"):
        if name not in OPS:
            OPS.register(_op(name))
    step = Node("step", "video_step", (), region="steps")
    decode = Node("decode", "video_decode", (Edge("step", "made", "read"),))
    return Workflow("video", (step, decode), {"picture": "decode"}, (Region("steps"),))


def _op(name: str) -> RequestOp:
    is_step = name == "video_step"
    return RequestOp(
        name=name,
        component="transformer" if is_step else "vae",
        message=VideoWork,
        size=_size,
        part="denoise" if is_step else "decode",
        sharing="together" if is_step else "single",
        parallel="sequence" if is_step else "none",
        inputs=(Port("read", "any", is_optional=True),),
        outputs=(Port("made", "any"),),
        make=_make,
    )


def _size(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens])


def _make(request: Request, node: Node, pages: NodePages) -> VideoWork:
    return VideoWork()


def _samples(durations: VideoDurations) -> Iterator[CostSample]:
    for name, tokens in TOKENS.items():
        for degree in durations.load.speed[name]:
            seconds, work = durations.of("video_step", name, degree), Work.of([tokens])
            yield CostSample(MODEL.name, "video_step", work, seconds, is_profile=True, degree=degree)
        pair = 2 * durations.of("video_step", name, 1)
        yield CostSample(MODEL.name, "video_step", Work.of([tokens] * 2), pair, is_profile=True)
        seconds = durations.of("video_decode", name, 1)
        yield CostSample(MODEL.name, "video_decode", Work.of([tokens]), seconds, is_profile=True)


def _request(name: str, arrival: Arrival, workflow: Workflow, steps: int) -> EngineRequest:
    tokens = TOKENS[arrival.name]
    return EngineRequest(
        request_id=name,
        model=MODEL.name,
        arrival=arrival.seconds,
        workflow=workflow.name,
        rounds=(steps,),
        spec=EditSpec(
            prompt="",
            sampling=SamplingParams(num_inference_steps=1, guidance_scale=1.0, seed=0),
            width=256,
            height=256,
            template=PIXELS,
            mask=PIXELS,
            active=ArrayRef(0, 0, (tokens,), "int32"),
            content_id="",
            num_tokens=tokens,
            max_text_tokens=0,
            outputs={"picture": Artefact(PIXELS)},
        ),
    )
