"""Predictor: predicts how long the work of one scheduler will take.

It translates requests into the keys and sizes of work that the cost model knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from core.costs.cost_model import CostKey, CostModel, extra_seconds
from core.costs.load_report import RequestLoad
from core.costs.profile import profile_of
from core.costs.useful_degree import useful_degree
from core.graph.op import OPS, Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import ModelKey
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from core.scheduling.reports.slowness import Slowness
from core.scheduling.requests.bindings import CONTROLNET, Bindings, ControlNets, ModelKeys
from core.scheduling.requests.request import Request, Status
from core.scheduling.requests.work_left import WorkLeft

FORGET_EVERY = 128
"""Observed batches after which all predictions are made again; at first sooner, because the first ones teach most."""


class Player(NamedTuple):
    """A served model, some of its ControlNets, or a class, whose work is of one kind."""

    name: str  # of the model, or of the class
    controlnets: ControlNets = ()


class Predictor:
    """All results are seconds; 0 for work unlike anything observed so far."""

    def __init__(
        self,
        cost: CostModel,
        bindings: Bindings,
        most_ranks: int = 1,
    ) -> None:
        """most_ranks: the most ranks that compute a step together, where that is useful; remaining work is predicted
        for them.
        """
        self.cost = cost
        self.slowness = Slowness()
        self._most_ranks = most_ranks
        self._bindings = bindings
        self._keys: dict[tuple[ModelKeys, str, int], CostKey] = {}  # (components, op, degree) -> key
        self._players_of: dict[CostKey, list[Player]] = {}  # see `players_of`
        self._seconds: dict[tuple[ModelKeys, str, Work], float] = {}  # see `batch_seconds`
        self._degrees: dict[tuple[ModelKeys, str, int, int, int], tuple[int, float]] = {}  # see `_useful`
        self._made_of = 0  # the generation of these two

    @property
    def generation(self) -> int:
        """Changes when all predictions are made again."""
        return self.cost.num_observed // FORGET_EVERY + self.cost.num_observed.bit_length()

    def key(self, keys: ModelKeys, op: Op, degree: int = 1) -> CostKey:
        """The key of an op with these components in the cost model. degree: ranks that compute it together; where each
        of them computes all of it, it takes as long as on one alone."""
        degree = 1 if op.parallel == "none" else degree
        found = self._keys.get((keys, op.name, degree))
        if found is None:
            found = self._keys[keys, op.name, degree] = _key(keys, op.cost_name, degree)
        return found

    def players_of(self, key: CostKey) -> Sequence[Player]:
        """Whose work has this key."""
        found = self._players_of.get(key)
        if found is None:
            found = [Player(name, nets) for name, info in self._bindings.models.items() for nets in _nets(info, key)]
            found += [Player(name) for name, each in self._bindings.classes.items() if (each.key,) == key.components]
            self._players_of[key] = found
        return found

    def forget(self, gone: Set[ModelKey]) -> None:
        """Forget what was known of classes that nobody names any more."""
        self._keys = {key: found for key, found in self._keys.items() if gone.isdisjoint(key[0].keys)}
        self._seconds = {key: found for key, found in self._seconds.items() if gone.isdisjoint(key[0].keys)}
        self._degrees = {key: found for key, found in self._degrees.items() if gone.isdisjoint(key[0].keys)}
        self._players_of.clear()
        self.cost.forget(gone)

    def op_seconds(self, keys: ModelKeys, op: Op, work: Work, degree: int = 1) -> float:
        """Seconds of running an op once over this much work, on this many ranks together."""
        return self.cost.predict(self.key(keys, op, degree), work)

    def batch_seconds(self, keys: ModelKeys, op: Op, work: Work) -> float:
        """Seconds of a batch on one rank. Kept for a while, because many requests need the same few."""
        self._forget_old()
        seconds = self._seconds.get((keys, op.name, work)) or self.op_seconds(keys, op, work)
        if seconds:
            self._seconds[keys, op.name, work] = seconds
        return seconds

    def _forget_old(self) -> None:
        if self._made_of != self.generation:
            self._made_of = self.generation
            self._seconds.clear()
            self._degrees.clear()

    def step_seconds(self, keys: ModelKeys, op: Op, work: Work, degree: int) -> float:
        """Seconds of a step of one request on this many ranks; 0 if unknown."""
        return self.cost.predict_step(self.key(keys, op, degree), work)

    def largest_batch(self, keys: ModelKeys, op: Op) -> int | None:
        """Rows of the largest batch in the op's profile; None without one."""
        profile = self.cost.profile(self.key(keys, op))
        return profile.largest if profile else None

    def largest_seen(self, keys: ModelKeys, op: Op) -> int:
        """Rows of the largest batch of an op that was profiled, or has run often on one rank; 0: there is none."""
        return max(self.cost.largest_seen(self.key(keys, op)), self.largest_batch(keys, op) or 0)

    def learn(self, samples: Iterable[CostSample]) -> None:
        """Train the cost model with batches measured before the first request, and give it the profiles."""
        profiled: dict[CostKey, list[tuple[Work, float]]] = {}
        for sample in samples:
            key = _key(self._bindings.keys(sample.model, *OPS[sample.op].components), sample.op, sample.degree)
            self.cost.observe(key, sample.work, sample.seconds)
            if sample.is_profile:
                profiled.setdefault(key, []).append((sample.work, sample.seconds))
        for key, measured in profiled.items():
            if (profile := profile_of(measured)) is not None:
                self.cost.add_profile(key, profile)

    # ------------------------------------------------------------------------------------------------- remaining work

    def work_left(self, request: Request) -> WorkLeft:
        """A request's remaining work, without loading its model. Kept for a while as long as it waits, because queues
        may be long and every plan asks.
        """
        kept = request.kept_work
        if kept is not None and kept[0] == self.generation and request.status is Status.WAITING:
            return kept[1]
        found = self._make_work_left(request)
        request.kept_work = self.generation, found
        return found

    def _make_work_left(self, request: Request) -> WorkLeft:
        before, after = self._seconds_beside(request)
        steps, seconds, serving, tokens, keys = 0, 0.0, 0.0, 0, 0
        for node in request.workflow.steps:
            for times, work in request.steps_left(node):
                of_node = times * self.batch_seconds(request.keys_of(node), op_of(node), work)
                if op_of(node).serves_step:
                    serving += of_node
                    continue
                seconds += of_node
                steps += times
                tokens += times * sum(work.queries)
                keys += times * sum(work.keys)
        mean = max(steps, 1)
        alone = before + seconds + serving + after
        return WorkLeft(steps, tokens / mean, keys / mean, serving, before, after, alone)

    def _seconds_beside(self, request: Request) -> tuple[float, float]:
        """(seconds before, seconds after) the steps."""
        before = after = 0.0
        workflow, progress = request.workflow, request.progress
        for node in workflow.nodes:
            if node.name in workflow.step_names or not (times := progress.times_left(node)):
                continue
            seconds = times * self.batch_seconds(request.keys_of(node), op_of(node), request.work(node))
            if node.name in workflow.after_rounds:
                after += seconds
            else:
                before += seconds
        return before, after

    def remaining_load(self, request: Request) -> RequestLoad:
        """A request's remaining work as reports tell it. Made once while it waits, because they tell changes alone."""
        if request.waiting_load is None or request.status is not Status.WAITING:
            request.waiting_load = self._make_request_load(request)
        return request.waiting_load

    def remaining_step_seconds(self, request: Request) -> float:
        """Seconds that a request's remaining steps add to the steps of its batch."""
        return sum(self._node_step_seconds(request, node) for node in request.workflow.steps)

    def _added_seconds(self, request: Request) -> float:
        """The same, with all of the time of what works for these steps, in batches of its own."""
        serving = (node for node in request.workflow.steps if op_of(node).serves_step)
        constants = (request.progress.times_left(node) * self._coefficients(request, node)[0] for node in serving)
        return self.remaining_step_seconds(request) + sum(constants)

    def _node_step_seconds(self, request: Request, node: Node) -> float:
        canvas, steps = request.spec.canvas(node.canvas), request.progress.times_left(node)
        every, active, num_full = canvas.num_all_tokens, canvas.num_active_tokens, steps
        if request.spec.is_mask_aware and not node.canvas:
            first = request.progress.scheduled[node.name]
            num_full = request.spec.num_full_steps(first, first + steps)
        line, seconds = self._coefficients(request, node), 0.0
        for number, tokens in (num_full, every), (steps - num_full, active):
            if number:
                share = self._useful(request, node, tokens, every)[1] if self._most_ranks > 1 else 1.0
                seconds += number * extra_seconds(line, tokens, every) * share
        return request.spec.num_rows * seconds

    def _useful(self, request: Request, node: Node, queries: int, keys: int) -> tuple[int, float]:
        """(number of ranks that are useful to a step, its time on so many as a share of its time on one). Kept for a
        while, as statistics ask for all running requests.
        """
        op = op_of(node)
        if op.parallel == "none" or request.runs_on_one_rank:
            return 1, 1.0
        self._forget_old()
        step = request.keys_of(node), op.name, queries, keys, request.spec.num_rows
        if (kept := self._degrees.get(step)) is not None:
            return kept
        work, seconds, degree = Work.of_pairs([(queries, keys)] * request.spec.num_rows), dict[int, float](), 1
        while degree <= self._most_ranks and (found := self.step_seconds(request.keys_of(node), op, work, degree)):
            seconds[degree] = found
            degree *= 2
        if not seconds:
            return 1, 1.0
        useful = useful_degree(seconds)
        self._degrees[step] = useful, seconds[useful] / seconds[1]
        return self._degrees[step]

    def _useful_degree(self, request: Request) -> int:
        """Ranks that are useful to a request's next steps."""
        node = request.step_node
        if self._most_ranks == 1 or node is None:
            return 1
        canvas = request.spec.canvas(node.canvas)
        is_masked = request.spec.is_mask_aware and not node.canvas
        active = canvas.num_active_tokens if is_masked else canvas.num_all_tokens
        return self._useful(request, node, active, canvas.num_all_tokens)[0]

    def other_seconds_by_op(self, request: Request) -> Iterable[tuple[str, float]]:
        """(op, seconds) of each remaining node of a request that is no step."""
        for node in request.workflow.nodes:
            if node.name not in request.workflow.step_names and (times := request.progress.times_left(node)):
                line = self._coefficients(request, node)
                work = request.work(node)
                pairs = zip(work.queries, work.keys, strict=True)
                yield node.op, times * (line[0] + sum(extra_seconds(line, *pair) for pair in pairs))

    def seconds_by_op(self, request: Request) -> Iterator[tuple[str, float]]:
        """(op, seconds) of each remaining node of a request. Steps count without their constant part."""
        yield from self.other_seconds_by_op(request)
        for node in request.workflow.steps:
            yield node.op, self._node_step_seconds(request, node)

    def base_seconds(self, requests: Sequence[Request]) -> float:
        """The constant part of the time of a step with these requests; 0 without requests."""
        if not requests:
            return 0.0
        node = requests[0].step_node
        return 0.0 if node is None else self.step_base_seconds(self.key(requests[0].keys_of(node), op_of(node)))

    def steps_left(self, request: Request) -> Iterator[tuple[CostKey, int]]:
        """(key, number that is not sent yet) of each kind of a request's steps, in graph order."""
        for node in request.workflow.steps:
            yield self.key(request.keys_of(node), op_of(node)), request.progress.times_left(node)

    def step_base_seconds(self, key: CostKey) -> float:
        """The constant part of the time of a step with this key."""
        return self.cost.coefficients(key)[0]

    def _make_request_load(self, request: Request) -> RequestLoad:
        work, head, is_running = self.work_left(request), request.head, request.status is Status.RUNNING
        added, other = self._added_seconds(request) / max(work.steps, 1), work.before + work.after
        told = head.priority, is_running, head.arrival, head.owner
        ranks = request.step_ranks if is_running else ()
        return RequestLoad(work.steps, added, other, *told, self._useful_degree(request), ranks)

    def _coefficients(self, request: Request, node: Node) -> tuple[float, ...]:
        return self.cost.coefficients(self.key(request.keys_of(node), op_of(node)))


def _key(keys: ModelKeys, cost_name: str, degree: int) -> CostKey:
    return CostKey(keys.family, keys.keys, cost_name, keys.device, degree)


def _nets(info: ModelInfo, key: CostKey) -> Iterator[ControlNets]:
    """The ControlNets of a model whose work has this key, once; none of them, if it is work of the model itself."""
    if (info.family, info.device) != (key.family, key.device):
        return
    kinds = {each.component for each in key.components}
    if kinds == {CONTROLNET}:
        names = tuple(sorted(name for name, each in info.controlnets.items() if each in key.components))
        if tuple(info.controlnets[name] for name in names) == key.components:
            yield names
    elif tuple(each for each in info.own if each.component in kinds) == key.components:
        yield ()
