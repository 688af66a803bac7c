"""Reporter: what a scheduler says of itself. It counts what was done and predicts what is left, and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.config import SchedulerConfig
from core.cost_model import CostKey, CostModel, Work, extra_seconds, token_seconds
from core.handles import ModelKey
from core.load_report import CopyLine, CostLine, EngineCosts, EngineStats, LoadReport, RequestLoad, StepSample
from core.messages.worker import BatchResult, PageCopied
from core.model_info import ModelInfo
from core.request import Request, Status
from core.stage_work import node_work
from core.stages import Node, Workflow
from core.template_pages import TemplatePages

COSTS_EVERY = 128
"""Batches after which the cost model is told again."""

MAX_RECENT_STEPS = 512
"""Steps told of one by one between two `stats`; of more, the last ones."""


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    batch_tokens: int = 0
    batch_requests: int = 0
    tokens_skipped: int = 0
    busy_seconds: dict[str, float] = field(default_factory=dict)  # by stage


class Reporter:
    """One per scheduler, which tells it of every request and every batch."""

    def __init__(
        self,
        config: SchedulerConfig,
        models: Mapping[str, ModelInfo],
        workflow: Workflow,
        cost: CostModel,
        pages: TemplatePages,
    ) -> None:
        self._config = config
        self._models = models
        self._workflow = workflow
        self._cost = cost
        self._pages = pages
        self._num_received = 0
        self._counters = Counters()
        self._recent_steps: list[StepSample] = []
        self._batches_since_costs = COSTS_EVERY
        self._begun: list[str] = []  # edits, since the last report

    def cost_key(self, model: ModelKey, stage: str) -> CostKey:
        return CostKey(model, stage, self._models[model.model].device, 1)

    # ------------------------------------------------------------------------------------------------- counting

    def note_received(self) -> None:
        """An edit or a template was taken in."""
        self._num_received += 1

    def note_begun(self, request_ids: Iterable[str]) -> None:
        """These edits run from now on."""
        self._begun += request_ids

    def note_batch(self, key: CostKey, work: Work, result: BatchResult, *, is_ok: bool) -> None:
        """A batch is done. The cost model learns from it, unless part of it failed."""
        busy = self._counters.busy_seconds
        busy[key.stage] = busy.get(key.stage, 0.0) + result.seconds
        self._batches_since_costs += 1
        if key.stage == "denoise":
            self._note_step(key, work, result)
        if is_ok:
            self._cost.observe(key, work, result.seconds)

    def note_copy(self, done: PageCopied) -> None:
        """An entry's pages were copied. The first copy from a tier is told of at once: until then loads look free."""
        if done.source not in self._cost.copy_lines():
            self._batches_since_costs = COSTS_EVERY
        self._cost.observe_copy(done.source, done.target, done.nbytes, done.seconds)

    def _note_step(self, key: CostKey, work: Work, result: BatchResult) -> None:
        counters, tokens = self._counters, sum(work.queries)
        counters.steps += 1
        counters.batch_tokens += tokens
        counters.tokens_skipped += sum(work.keys) - tokens
        counters.batch_requests += len(result.items)
        if result.num_parts > 1:
            return  # other passes than the one that could be predicted
        predicted, bound = self._cost.predict(key, work), token_seconds(self._cost.coefficients(key), work)
        self._recent_steps.append(
            StepSample(
                num_requests=len(result.items),
                num_tokens=tokens,
                seconds=result.seconds,
                predicted_seconds=predicted,
                bound_seconds=bound,
                started=result.started,
                request_ids=tuple(item.request_id for item in result.items),
            )
        )
        del self._recent_steps[:-MAX_RECENT_STEPS]

    # ------------------------------------------------------------------------------------------------- telling

    def load(self, requests: Sequence[Request], counts: tuple[int, int]) -> LoadReport:
        """The report on these requests, most urgent first, of which so many are running and waiting. What has changed
        since the last one is told once.
        """
        loads = tuple(self.left_of(request) for request in requests if request.is_live)
        base = self.base_seconds(requests)
        priming = self._priming_seconds()
        return LoadReport(
            num_received=self._num_received,
            num_running=counts[0],
            num_waiting=counts[1],
            requests=loads,
            base_seconds=base,
            priming_seconds=priming,
            drain_seconds=priming + _drain_seconds(loads, base, self._config.max_num_seqs),
            residency=self._pages.cache.take_residency(),
            costs=self._take_costs(),
            begun=self._take_begun(),
        )

    def stats(self, requests: Sequence[Request]) -> EngineStats:
        """Totals, and what was learnt; recent steps are told once."""
        counters = self._counters
        recent, self._recent_steps = tuple(self._recent_steps), []
        return EngineStats(
            stage_seconds=self._stage_seconds_left(requests),
            resident_models=self._resident_models(),
            r_squared={key.stage: value for key, value in self._cost.r_squared().items()},
            steps=counters.steps,
            batch_tokens=counters.batch_tokens,
            batch_requests=counters.batch_requests,
            tokens_skipped=counters.tokens_skipped,
            prime_chunks=self._pages.num_chunks,
            busy_seconds=dict(counters.busy_seconds),
            recent_steps=recent,
            cache=self._pages.cache.stats(),
        )

    def _take_begun(self) -> tuple[str, ...]:
        begun, self._begun = tuple(self._begun), []
        return begun

    def _take_costs(self) -> EngineCosts | None:
        """The cost model, if it has learnt something since it was told last."""
        if self._batches_since_costs < COSTS_EVERY:
            return None
        self._batches_since_costs = 0
        lines = tuple(CostLine(key.model, key.stage, line) for key, line in self._cost.lines().items())
        copies = tuple(CopyLine(source, line) for source, line in self._cost.copy_lines().items())
        return EngineCosts(lines, copies)

    def _resident_models(self) -> tuple[ModelKey, ...]:
        components = sorted({node.component for node in self._workflow.nodes})
        return tuple(ModelKey(name, component) for name in self._models for component in components)

    # ------------------------------------------------------------------------------------------------- predicting

    def _coefficients(self, request: Request, node: Node) -> tuple[float, ...]:
        return self._cost.coefficients(self.cost_key(ModelKey(request.edit.model, node.component), node.stage))

    def left_of(self, request: Request) -> RequestLoad:
        """What is left of a request. Of one that waits as it was at first: nothing has changed, and a queue is long."""
        if request.waiting_load is None or request.status is not Status.WAITING:
            request.waiting_load = self._make_request_load(request)
        return request.waiting_load

    def _make_request_load(self, request: Request) -> RequestLoad:
        steps = request.progress.steps_left
        step_seconds = self._step_seconds_left(request) / steps if steps else 0.0
        other_seconds = sum(seconds for _, seconds in self._other_seconds(request))
        is_running = request.status is Status.RUNNING
        edit = request.edit
        return RequestLoad(steps, step_seconds, other_seconds, edit.sampling.priority, is_running, edit.arrival)

    def _step_seconds_left(self, request: Request) -> float:
        """What its steps left add to the steps of its batch."""
        progress, every, active = request.progress, request.num_all_tokens, request.num_active_tokens
        steps = progress.steps_left
        num_full = steps
        if request.edit.is_mask_aware:
            num_full = min(steps, max(0, (request.edit.sampling.full_steps or 0) - progress.steps_scheduled))
        line = self._coefficients(request, self._workflow.loop)
        full, masked = extra_seconds(line, every, every), extra_seconds(line, active, every)
        return request.edit.sampling.num_rows * (num_full * full + (steps - num_full) * masked)

    def _other_seconds(self, request: Request) -> Iterable[tuple[str, float]]:
        """(stage, seconds) of what is left but its steps."""
        for node in self._workflow.nodes:
            if node.kind == "once" and request.progress.times_left(node):
                line = self._coefficients(request, node)
                work = node_work(request, node)
                pairs = zip(work.queries, work.keys, strict=True)
                yield node.stage, line[0] + sum(extra_seconds(line, *pair) for pair in pairs)

    def base_seconds(self, requests: Sequence[Request]) -> float:
        """What a step takes whoever is in it; 0 if nobody is."""
        if not requests:
            return 0.0
        model, loop = requests[0].edit.model, self._workflow.loop
        return self._cost.coefficients(self.cost_key(ModelKey(model, loop.component), loop.stage))[0]

    def _priming_seconds(self) -> float:
        """Predicted work left on templates' pages."""
        component = self._workflow.loop.component
        return sum(
            self._cost.predict(
                self.cost_key(ModelKey(job.template.model, component), "prime"),
                Work((self._pages.tokens_left(job),), (job.template.pass_tokens,)),
            )
            for job in self._pages.all_jobs()
        )

    def _stage_seconds_left(self, requests: Sequence[Request]) -> dict[str, float]:
        """Predicted worker time left per stage, if batches are as full as the queue lets them be."""
        live = [request for request in requests if request.is_live]
        left = {"prime": self._priming_seconds(), "denoise": self._denoise_seconds_left(live)}
        for request in live:
            for stage, seconds in self._other_seconds(request):
                left[stage] = left.get(stage, 0.0) + seconds
        return {stage: seconds for stage, seconds in left.items() if seconds}

    def _denoise_seconds_left(self, live: Sequence[Request]) -> float:
        steps = sum(request.progress.steps_left for request in live)
        together = min(self._config.max_num_seqs, max(1, len(live)))
        return sum(map(self._step_seconds_left, live)) + steps * self.base_seconds(live) / together


def _drain_seconds(loads: Sequence[RequestLoad], base_seconds: float, max_num_seqs: int) -> float:
    """Until all these are done, if batches are as full as they can be."""
    together = min(max_num_seqs, max(1, len(loads)))
    base = base_seconds / together
    return sum(load.steps_left * (load.step_seconds + base) + load.other_seconds for load in loads)
