"""StepScheduler: decides which requests denoise one step together, and which other work runs beside it.

Step-level continuous batching: the batch is re-formed at every iteration, so a request joins at the next step and
leaves right after its last. Pure: time is an argument, effects are the returned plan. It handles no tensors,
processes or HTTP.

One iteration is schedule -> (a worker runs the plan) -> apply; `take_outputs` returns the messages for clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import inf

import msgspec

from core.cache.activation_cache import ActivationCache
from core.config import CacheConfig, SchedulerConfig
from core.costs.cost_model import CostKey, CostModel
from core.costs.load_report import EngineStats, LoadReport
from core.errors import InvalidRequestError, RunError
from core.failure import Failure
from core.graph.catalog import WORKFLOWS, with_registered, with_variants
from core.graph.check import check_workflow
from core.graph.op import OPS
from core.graph.workflow import Workflow
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import (
    Aborted,
    AdaptersUsed,
    DropTemplate,
    EngineRequest,
    Failed,
    Output,
    PrimeTemplate,
    UseAdapters,
)
from core.messages.worker import BatchResult, CostSample, Free, Load, PageCopied, StepPlan, TransferDone
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS, RunClass
from core.scheduling.dispatcher import Dispatched, Dispatcher
from core.scheduling.endings import Endings
from core.scheduling.model_loads import LoadAnswer, ModelLoads
from core.scheduling.node_cache import CacheOrders, NodeCache
from core.scheduling.ops.prime import PRIME
from core.scheduling.policies import make_policy
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.ranks.in_flight import Busy, Flight, InFlight
from core.scheduling.ranks.ranks import Ranks
from core.scheduling.ranks.residency import Residency, Started, keys_of
from core.scheduling.ranks.step_limit import StepLimit
from core.scheduling.recovery.checkpoints import Checkpoints
from core.scheduling.recovery.recovery import Recovery, Resumed
from core.scheduling.refusals import Refusals
from core.scheduling.reports.predictor import Predictor
from core.scheduling.reports.reporter import Reporter
from core.scheduling.requests.bindings import Bindings, Needs
from core.scheduling.requests.deadlines import PASSED, passed
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status
from core.scheduling.results import Results
from core.scheduling.values.values import ValueTable
from core.scheduling.view import ViewMaker


class StepScheduler:
    """Owns every Request from `add` until its terminal message."""

    def __init__(
        self,
        config: SchedulerConfig,
        models: Mapping[str, ModelInfo],
        num_workers: int = 1,
        cache: CacheConfig | None = None,
        cost: CostModel | None = None,
        device_page_bytes: Sequence[int] | None = None,
        policy: SchedulingPolicy | None = None,
        sizes: Iterable[LoadedComponent] = (),
        classes: Sequence[RunClass] = (),
        workflows: Iterable[Workflow] = (),
    ) -> None:
        """cost: the model to predict with and to train; by default an empty one. device_page_bytes: bytes of device
        memory for pages, by rank; by default `device_bytes` of `cache` for each. policy: by default a new one of the
        name in `config`. sizes: predicted sizes of components that may not be loaded yet. classes, workflows: that a
        user has registered. Raises WorkflowError.
        """
        self.config = config
        self.models = dict(models)
        for workflow in WORKFLOWS.values():
            check_workflow(workflow)
        self.workflows = with_registered(workflows, {each.name for each in classes})
        self.cost = cost or CostModel()
        self._policy = policy or make_policy(config.policy)
        most_ranks = min(num_workers, config.max_degree)
        self._bindings = Bindings(self.models, classes, self.workflows.values())
        set_size = config.degree if self._policy.spreads_models else num_workers
        declared = [LoadedComponent(each.key, each.nbytes) for each in sorted(classes, key=lambda each: each.nbytes)]
        loading = [*sizes, *declared], config.model_bytes, self.cost.predict_load
        residency = Residency(self._bindings, num_workers, set_size, *loading)
        self._predictor = Predictor(self.cost, self._bindings, most_ranks)
        self._step_limit = StepLimit(config.max_num_batched_tokens)
        cache = cache or CacheConfig()
        device_bytes = device_page_bytes or [cache.device_bytes or 0] * num_workers
        served = self._bindings, self._predictor, config.max_num_seqs
        self.cache: NodeCache = ActivationCache(cache, device_bytes, *served)
        max_plans = 1 if self.cache.may_lose_pages else config.max_plans_in_flight
        self.num_workers = num_workers
        self._requests = LiveRequests()
        self._in_flight = InFlight(num_workers, max_plans, config.max_ahead_ms / 1e3)
        self.values = ValueTable()
        self._free: list[Free] = []
        self._passed_over: frozenset[int] = frozenset()  # ranks that got no work in any pass since the last event
        self._outputs: list[Output] = []
        self.ranks = Ranks(num_workers, residency)
        self._plan_seqs = count()
        self._now = 0.0  # of the last pass
        self.next_pass = inf
        """When a pass is due although nothing may have come, monotonic seconds; inf: none is."""
        self._dispatcher = Dispatcher(self.cache, self.values, self.ranks, self._predictor.op_seconds, count())
        self._checkpoints = Checkpoints(self.values)
        parts = self._requests, self.values, self.cache
        self._endings = Endings(*parts, self._note_end, self._outputs, self._free)
        self._refusals = Refusals(residency, self._requests, self.cache, self._endings)
        self._reporter = Reporter(config, self.ranks, self._predictor, self.cache, self._bindings)
        self._loads = ModelLoads(residency, self._requests, self.cache, self._refusals, self.cost, self._policy)
        load, retries = self._predictor.remaining_load, config.max_retries
        self._recovery = Recovery(*parts, self._in_flight, self._checkpoints, load, retries)
        self._results = Results(*parts, self._endings, self._recovery, self._checkpoints)
        self._views = ViewMaker(
            config=config,
            requests=self._requests,
            ranks=self.ranks,
            in_flight=self._in_flight,
            residency=residency,
            cache=self.cache,
            values=self.values,
            predictor=self._predictor,
            step_limit=self._step_limit,
        )

    def learn(
        self, samples: Iterable[CostSample], loaded: Iterable[Started] = (), ports: Mapping[int, int] | None = None
    ) -> None:
        """Train the cost model with measurements from before the first batch. loaded: the components of each worker.
        ports: see `Ranks.note_ports`.
        """
        self._predictor.learn(samples)
        self._loads.residency.join_all(loaded)
        self.ranks.note_ports(ports or {})

    # ------------------------------------------------------------------------------------------------- workflows

    def add_workflow(
        self, workflow: Workflow, classes: Iterable[RunClass], roles: Mapping[str, str] | None = None
    ) -> None:
        """Take requests of one more workflow, which was checked, and of its variants. Its name is its content's alone:
        one that is here already is this one. classes: of users, that it names. roles: of its model, with it; None: each
        model's own.
        """
        known = tuple(classes)
        for each in with_variants(workflow):
            self.workflows[each.name] = each
            self._bindings.add(each.name, known, roles)
        self._loads.residency.note_named(LoadedComponent(each.key, each.nbytes) for each in known)

    def drop_workflow(self, name: str) -> None:
        """Forget a workflow that no request has, nor will, and have ranks drop those of its classes that no other one
        names.
        """
        if (workflow := self.workflows.get(name)) is None:
            return
        gone = set[ModelKey]()
        for each in with_variants(workflow):
            del self.workflows[each.name]
            gone |= self._bindings.drop(each.name)
        self._predictor.forget(gone)
        self._refusals.forget(gone)
        self._loads.residency.retire(gone)

    def try_workflow(self, name: str) -> None:
        """Have ranks load a workflow's classes although no request waits for them, see `trial_of`; where bytes are
        limited, they are not: others might be dropped for them."""
        if (needs := self._class_needs(name)) is not None and not self._loads.residency.budget:
            self._loads.residency.note_wanted(needs)

    def trial_of(self, name: str, now: float) -> Failure | bool:
        """Why a workflow's classes cannot be loaded, or else whether they are, or need not be tried any more."""
        needs, residency = self._class_needs(name), self._loads.residency
        if needs is None or residency.budget or not (missing := residency.missing(needs)):
            return True
        if (refusal := residency.refusal_of_loads(needs, now)) is not None:
            why = f"Invalid workflow: a class cannot be loaded: {refusal.failure.message}."
            return Failure("invalid_request", why, code="invalid_workflow")
        if residency.has_failed(keys_of(missing)):
            return Failure.of(RunError("a worker ended while it loaded the workflow's classes"))
        return False

    def _class_needs(self, name: str) -> Needs | None:
        """What a workflow's users' classes are; None: it was dropped. Models are loaded for their own requests."""
        workflow = self.workflows.get(name)
        names = () if workflow is None else sorted(workflow.class_names)
        needs = tuple(dict.fromkeys(self._bindings.keys(each, RUN_CLASS) for each in names))
        return None if workflow is None else needs

    # ------------------------------------------------------------------------------------------------- requests

    def add(self, head: EngineRequest) -> None:
        """Add a request. A duplicate id raises ValueError."""
        if head.request_id in self._requests:
            raise ValueError(f"request {head.request_id} is here already")
        try:
            request = Request.of(head, self.workflows, self._bindings)
        except InvalidRequestError as error:
            return self.refuse(head.request_id, Failure.of(error))
        if (failure := self._refusal(head, request.needs)) is not None:
            return self.refuse(head.request_id, failure)
        self._loads.residency.note_wanted(request.needs)
        self._reporter.note_received()
        self._policy.on_arrival(request)
        self._requests.add(request, self._predictor.remaining_load(request))
        self._tell_adapters(request)

    def _refusal(self, head: EngineRequest | PrimeTemplate, needs: Needs) -> Failure | None:
        now = max(head.arrival, self._now)  # one that is sent again has come long ago
        return self._refusals.failure_of(head.model, needs, head.owner, now)

    def use_adapters(self, use: UseAdapters) -> None:
        """Let a request have its late adapters from its next step on, if it has not ended."""
        request = self._requests.get(use.request_id)
        if request is None or not request.is_live:
            return
        request.use_adapters(use.patches)
        self._policy.on_adapters(request)
        self._tell_adapters(request)

    def _tell_adapters(self, request: Request) -> None:
        if (step := request.steps_without_lora) is not None:
            self._outputs.append(AdaptersUsed(request_id=request.id, step=step))

    def refuse(self, request_id: str, failure: Failure) -> None:
        """Answer a request that cannot be added."""
        self._reporter.note_received()
        self._outputs.append(Failed(request_id=request_id, failure=failure))

    def add_template(self, prime: PrimeTemplate) -> None:
        """Add a template to be primed and kept. A duplicate id raises ValueError."""
        if prime.request_id in self._requests or prime.request_id in self.cache.template_requests:
            raise ValueError(f"request {prime.request_id} is here already")
        needs = self._loads.residency.priming_needs_of(prime.model)
        if (failure := self._refusal(prime, needs)) is not None:
            return self.refuse(prime.request_id, failure)
        self._reporter.note_received()
        self.cache.add_template(prime)

    def drop_template(self, drop: DropTemplate) -> None:
        """Drop a template's pages once no request uses them."""
        self.cache.drop_template(drop)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests. Ids of ended requests are ignored: their terminal message crossed the abort on its way."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.is_live:
                self._endings.end(request, Status.ABORTED, Aborted(request_id=request_id))
            elif request_id in self.cache.template_requests:
                self.cache.abort_template(request_id)
        self._outputs += self.cache.take_answers()

    def fail_all(self, failure: Failure) -> None:
        """End every request now, because all workers are gone."""
        self.cache.abandon(failure)
        self.values.clear()
        self._endings.fail_all(failure)
        self._outputs += self.cache.take_answers()
        self._in_flight.clear()

    @property
    def num_requests(self) -> int:
        return len(self._requests) + len(self.cache.template_requests)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return self._requests.counts

    # ------------------------------------------------------------------------------------------------- ranks

    def lose_rank(
        self,
        rank: int,
        failure: Failure,
        now: float = 0.0,
        *,
        is_fast: bool = False,
        culprit: str | ModelKey | None = None,
    ) -> None:
        """Note that a rank's worker has died. Requests that have lost something with it resume from what is left, on
        other ranks or when it joins again. failure: the failure of requests that have used up their retries. is_fast:
        it had served only briefly, so that what it ran may be to blame. culprit: what is to blame, whenever it died: a
        request by its id, which fails with it, or the component that it was loading; None: nobody knows.
        """
        loading = self._loads.residency.loading_now(rank)
        if isinstance(culprit, str) and (to_blame := self._requests.get(culprit)) is not None:
            self._endings.fail(to_blame, failure)
        self.ranks.lose(rank)
        aftermath = self._recovery.lose(rank, failure, culprit)
        self._endings.fail_each(aftermath.failed)
        for job_id, result in aftermath.failed_jobs:
            self._results.apply_job(job_id, result)
        self._apply_landed()
        for request in aftermath.requests.values():
            self._results.settle(request)
        self._endings.finish_lenders()
        if isinstance(culprit, ModelKey):
            self._refusals.note_failed_load(rank, culprit, failure, now)
        elif is_fast or culprit is not None:
            self._refusals.note_death(rank, aftermath.blame, None if culprit else loading, failure, now)
        self._outputs += self.cache.take_answers()

    def join_rank(self, rank: int, components: Iterable[LoadedComponent], port: int = 0) -> None:
        """Note that the worker of a lost rank has been restarted and has loaded these components."""
        self.ranks.join(rank, components, port)
        self.cache.join_rank(rank)

    # ------------------------------------------------------------------------------------------------- one iteration

    def schedule(self, now: float, *, again: bool = False) -> StepPlan | None:
        """The next plan; None when nothing can start before the next event. again: no event has come since the last
        call, so that the ranks which that one left without work need not be looked at again.
        """
        self._passed_over = self._passed_over if again else frozenset()
        if again and self._in_flight.has_busy and self._views.open_ranks <= self._passed_over:
            return None
        self._now = now
        self.next_pass = self.next_pass if self.next_pass > now else inf
        plan, is_freed = self._run_pass(now)
        while plan is None and is_freed:
            plan, is_freed = self._run_pass(now)
        return plan

    def _run_pass(self, now: float) -> tuple[StepPlan | None, bool]:
        """(a plan, if there is anything to do; whether other requests may begin now, because some were given up or have
        left the arena)
        """
        if self._requests.has_due:
            self._endings.fail_each((each, PASSED) for each in list(passed(self._requests.live(), now)))
        if not self.ranks.up:
            return None, False
        self.cache.reserve(self._requests, self._page_rank)
        while answers := self.cache.take_answers():  # the next template request may be answered at once, too
            self._outputs += answers
            self.cache.reserve(self._requests, self._page_rank)
        loads = self._loads.order(now)
        view = self._views.view(now, self._passed_over, self._loads.startable)
        chosen = self._dispatcher.carry_out(self._policy.choose(view, now) if view.open_ranks else (), view)
        self._passed_over = chosen.passed_over(view, self._passed_over)
        self.next_pass = min(self.next_pass, now + chosen.again_after)
        self._note_sent(chosen.flights)
        self._endings.fail_each(chosen.given_up)
        chosen.transfers += self._checkpoints.transfers(chosen.ranks | view.idle_ranks)
        for request_id in chosen.begun:
            self._requests.begin(request_id, lambda request: self._predictor.remaining_load(request).seconds)
        orders = self.cache.take_orders()
        for key in orders.free:
            self._free.append(Free(key, tuple(range(self.num_workers))))
            self._recovery.forget_job(key.request_id)
        self._free += self.values.take_freed()
        has_work = bool(chosen.flights or chosen.transfers or orders.has_any or loads)
        is_freed = bool(chosen.given_up) or (not has_work and self._recovery.make_room(chosen.without_room))
        # Freeing alone can wait for the next plan with work, unless none is expected.
        if not has_work and (is_freed or not self._free or self._in_flight.has_busy):
            return None, is_freed
        return self._send(chosen, orders, loads, now), is_freed

    def apply(self, result: BatchResult) -> None:
        """Process one rank's result of a batch. The batch is applied when all of its ranks have answered. An unknown
        batch raises KeyError.
        """
        self._in_flight.land(result)
        self.ranks.note_answer(result.rank, result.seconds)
        self._apply_landed()

    def _apply_landed(self) -> None:
        """Apply the batches that have landed, each after the batches that it has read from."""
        landed = self._in_flight.landed
        while (flight := next(filter(self._results.is_in_turn, landed), None)) is not None:
            landed.remove(flight)
            result = flight.result()
            self._note_batch(flight, result)
            self._results.apply(flight, result)

    def _note_batch(self, flight: Flight, result: BatchResult) -> None:
        """Note the result of a batch as a whole: it trains predictions, policy and step limit."""
        is_ok, batch = not any(item.failure for item in result.items), flight.batch
        key = self._predictor.key(flight.keys, OPS[batch.op], len(batch.ranks))
        if not is_ok and len(batch.ranks) > 1 and OPS[batch.op].parallel != "none":
            self.ranks.break_groups()
        is_usual = is_ok and flight.is_whole and result.num_parts == 1 and all(item.is_usual for item in result.items)
        self._reporter.note_batch(key, flight, result, is_usual=is_usual)
        self._predictor.slowness.note(flight, result, is_usual=is_usual)
        self._policy.on_result(flight.batch, result)
        if is_ok:
            self._refusals.note_good_batch(flight, self._now)
        if is_ok and flight.is_step:
            self._step_limit.note(sum(flight.work.queries), result.num_parts)

    def apply_transfer(self, done: TransferDone) -> None:
        """Note that a value has been written to shared memory."""
        self._in_flight.land_transfer(done)
        request = self._requests[done.ref.key.request_id]
        request.num_moving -= 1
        self.values.end_move(done.ref.key)
        self._checkpoints.note_moved(request)
        self._results.settle(request)

    def apply_copy(self, done: PageCopied) -> None:
        """Process the end of a copy of a cache entry between tiers, successful or not."""
        if done.ok:
            self._reporter.note_copy(done)
        self.cache.finish_copy(done)
        self._outputs += self.cache.take_answers()
        for request in () if done.ok else self._requests.running:
            self._results.settle(request)

    def apply_load(self, answer: LoadAnswer, now: float) -> None:
        """Process a rank's answer to an order to load a component."""
        self._loads.apply(answer, now)
        self._outputs += self.cache.take_answers()

    def take_outputs(self) -> tuple[Output, ...]:
        """Messages for clients since the last call, in order."""
        outputs, self._outputs[:] = tuple(self._outputs), ()
        return outputs

    def take_refused(self) -> list[str]:
        """What is refused since the last call, in words."""
        return self._refusals.take_new()

    def take_resumed(self) -> list[Resumed]:
        """Requests that have resumed after a rank's death since the last call."""
        return self._recovery.take_resumed()

    # ------------------------------------------------------------------------------------------------- what it knows

    def busy_ranks(self, ranks: Iterable[int]) -> dict[int, Busy]:
        """See `InFlight.busy_ranks`."""
        return self._in_flight.busy_ranks(ranks)

    def cost_key(self, model: str, op: str) -> CostKey:
        """The key of an op of a model in the cost model, at degree 1."""
        return self._predictor.key(self._bindings.keys(model, *OPS[op].components), OPS[op])

    def load_report(self) -> LoadReport:
        """The current load. Each change is contained in one report."""
        return self._reporter.load(self._requests)

    def stats(self) -> EngineStats:
        """Totals since start."""
        return self._reporter.stats(self._requests, self._recovery.steps_repeated)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. Cheap enough to run when idle."""
        self._requests.check_integrity()
        ids = {request.id for request in self._requests.in_order()}
        assert ids == {request.id for request in self._requests}
        self._endings.check_integrity()
        self.cache.check_integrity()
        assert self._in_flight.flights or not self._in_flight.landed, "results wait for runs that are not in flight"
        flights = (each for each in (*self._in_flight.flights, *self._in_flight.landed) if not each.job_id)
        num_out = sum(len(flight.batch.items) for flight in flights)
        assert num_out == sum(request.progress.num_in_flight for request in self._requests)
        self._in_flight.check_integrity(self.values.num_moving)
        self.values.check_integrity(ids)
        self._checkpoints.check_integrity(self._requests)

    # ------------------------------------------------------------------------------------------------- inside

    def _note_sent(self, flights: Iterable[Flight]) -> None:
        for item in (item for flight in flights if not flight.job_id for item in flight.batch.items):
            self._requests.note_progress(self._requests[item.request_id])

    def _page_rank(self, template: str, model: str) -> int:
        """The rank on whose device to put a template's pages: of those that have the model, if there are any."""
        having = self.ranks.residency.homes(self._bindings.keys(model, *PRIME.components)).ranks
        return self._policy.page_rank(template, having or self.ranks.up)

    def _send(self, chosen: Dispatched, orders: CacheOrders, loads: tuple[Load, ...], now: float) -> StepPlan:
        plan = chosen.plan(next(self._plan_seqs), orders, self._free, self.ranks.up[0])
        self._free.clear()
        for flight in chosen.flights:
            self._in_flight.send(plan.seq, flight, now)
            self._loads.note_batch(flight, now)
            self.ranks.uses.note_batch(flight, now)
        self._in_flight.send_transfers(plan.seq, chosen.transfers)
        return msgspec.structs.replace(plan, loads=loads) if loads else plan

    def _note_end(self, request_id: str) -> None:
        self._policy.on_end(request_id)
        self._checkpoints.forget(request_id)
