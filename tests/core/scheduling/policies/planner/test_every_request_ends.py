"""Random requests on random ranks, with aborts, deaths and rejoins: every request ends, and the policy forgets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import msgspec
import pytest
from any_ranks import answer_of
from both_passes import compared
from cache_kit import SCHEME, TEMPLATE_BYTES, make_masked, make_registration
from fakes import MODEL, FakePages, FakeWorkers, make_edit, make_hires_edit, make_mask_request, make_selecting_edit
from ranks_that_die import COMPONENT_BYTES, LiveSite
from run_workflows import CLASSES, random_workflow, run_request

from core.config import CacheConfig, SchedulerConfig
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import EngineRequest
from core.messages.worker import CostSample, StepPlan
from core.model_info import ModelInfo
from core.scheduling.policies.planner import copies
from core.scheduling.policies.planner.default import Default
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler

SEEDS = (*range(80), 245, 465, 1259, 1363, 1368, 1397, 1414, 5417, 20022, 6336)
"""With each of the last ones all ranks once waited: pages were to be primed by a model that was not loaded, or small
requests had no ranks when the large ones, or the first of the small ones, had ended, or others when one that had to run
alone was given up. With the last of all steps were repeated on a rank that held what another one waited for."""

TEXT_ENCODER, VAE = ModelKey("0", "text_encoder"), ModelKey("0", "vae")

SECONDS = {88: {1: 0.1, 2: 0.11, 4: 0.125}, 280: {1: 0.4, 2: 0.205, 4: 0.19}, 1048: {1: 1.2, 2: 0.67, 4: 0.35}}
"""Tokens of a step, 24 of them text -> ranks that compute it -> its time."""

TEXT_TOKENS = 24


class Stress(LiveSite):
    """A site whose models, ranks, limits, costs and requests are drawn at random."""

    def __init__(self, random: Random) -> None:
        self.has_pages = random.random() < 0.4
        self.models = _models(random, has_pages=self.has_pages)
        self.served = [random_workflow(random, f"w{index}", random.randint(1, 4)) for index in range(2)]
        self.policy = Default()
        self.num_ranks = random.choice([1, 2, 2, 3, 4, 4, 5])
        self.config = _config(random, self.num_ranks)
        workers = FakeWorkers(self.num_ranks, omitted={"sampler"}, answers=answer_of, pages=FakePages(7))
        super().__init__(random, self._scheduler(random), workers)
        self._start(random)
        self.added: list[str] = []
        self.num_copies = 0  # of models that were wanted, over all passes
        self._num_deaths_left = random.choice([0, 0, 1, 3, 6])
        self._without_steps: set[str] = set()  # ids of requests that have left their slots

    def _scheduler(self, random: Random) -> StepScheduler:
        device_bytes = random.choice([0, 0, 3 * TEMPLATE_BYTES]) if self.has_pages else 0
        scheduler = StepScheduler(
            self.config,
            self.models,
            self.num_ranks,
            CacheConfig(host_bytes=random.choice([1, 2, 3, 8]) * TEMPLATE_BYTES),
            device_page_bytes=[device_bytes] * self.num_ranks,
            policy=self.policy,
            sizes={each for info in self.models.values() for each in _components(info)},
            classes=CLASSES,
        )
        scheduler.workflows |= {workflow.name: workflow for workflow in self.served}
        return scheduler

    def _start(self, random: Random) -> None:
        """All workers have loaded all models, or one if there is not room for all."""
        first = [self.models["a"]] if self.config.model_bytes else [*self.models.values()]
        loaded = list(dict.fromkeys(each for info in first for each in _components(info)))
        self.workers.loaded = [{each.key for each in loaded} for _ in range(self.num_ranks)]
        self.scheduler.learn(_samples(random, self.models), [(rank, loaded) for rank in range(self.num_ranks)])

    # ------------------------------------------------------------------------------------------------ what happens

    def run(self, num_requests: int) -> None:
        """Let requests come, be aborted and lose ranks, until all have ended."""
        while len(self.added) < num_requests or (self._num_deaths_left and self.scheduler.num_requests):
            if len(self.added) < num_requests and self._random.random() < 0.4:
                self.add()
            if self.added and self._random.random() < 0.03:
                self.scheduler.abort([self._random.choice(self.added)])
            self.step()
            if self._num_deaths_left and self._random.random() < 0.15:
                self.disturb_once()
        self.finish()

    def step(self) -> None:
        self.now += self._random.choice([0.0, 0.01, 0.3, 1.0])
        super().step()

    def schedule(self) -> None:
        super().schedule()
        self.num_copies += len(self.policy.copies)
        self.check_slots()

    def disturb_once(self) -> None:
        """Let a rank die, or one that has died join again."""
        up, dead = self.scheduler.ranks.up, sorted(self.workers.dead)
        if up and self._random.random() < 0.6:
            self.kill(self._random.choice(up))
            self._num_deaths_left -= 1
        elif dead:
            self.join(self._random.choice(dead))

    def add(self) -> None:
        name = str(len(self.added))
        self.added.append(name)
        if self.has_pages and self._random.random() < 0.15:
            # No model is loaded for idle work, which may wait for one as long as no request asks for it.
            is_idle_work = not self.config.model_bytes and self._random.random() < 0.5
            template = make_registration(name, self._content(), is_idle_work=is_idle_work)
            self.scheduler.add_template(msgspec.structs.replace(template, model=self._model(), arrival=self.now))
        else:
            self.scheduler.add(self._with_wishes(self._request(name)))

    def _request(self, name: str) -> EngineRequest:
        """A request of any kind."""
        random, steps = self._random, self._random.randint(1, 12)
        kinds = ["edit", "edit", "hires", "mask", "selecting", "run", *(["masked"] * 3 if self.has_pages else [])]
        match random.choice(kinds):
            case "hires":
                return make_hires_edit(name, steps=steps)
            case "mask":
                return make_mask_request(name, steps=steps)
            case "selecting":
                return make_selecting_edit(name, steps=steps, is_mask_aware=self.has_pages and random.random() < 0.5)
            case "run":
                return run_request(name, random.choice(self.served))
            case "masked":
                active, full = random.choice([26, 64, 256]), random.choice([0, 0, 1])
                return make_masked(name, content=self._content(), steps=steps, active=active, full_steps=full)
        tokens = random.choice([*SECONDS]) - TEXT_TOKENS
        return make_edit(name, steps=steps, num_tokens=tokens, partial_images=random.choice([0, 0, 1, 2]))

    def _with_wishes(self, request: EngineRequest) -> EngineRequest:
        """A request that comes now, for any model and owner, with any urgency."""
        random = self._random
        return msgspec.structs.replace(
            request,
            model=self._model(),
            arrival=self.now,
            objective=random.choice([None, None, 0.0, self.now + random.uniform(-5, 60)]),
            deadline=self.now + random.uniform(5, 500) if random.random() < 0.1 else None,
            owner=random.choice(["", "x", "y"]),
            priority=random.choice([0, 0, -1, 2]),
        )

    def _model(self) -> str:
        return self._random.choice([*self.models])

    def _content(self) -> str:
        return self._random.choice(["c0", "c1", "c2", "c3"])

    def answer(self, rank: int) -> bool:
        if queue := self.workers.queues[rank]:
            self.check_weights(rank, queue[0])
        return super().answer(rank)

    # ------------------------------------------------------------------------------------------------ what is checked
    def check_weights(self, rank: int, plan: StepPlan) -> None:
        """A rank has all components that the batches of a plan compute with."""
        for batch in (each for each in plan.batches if rank in each.ranks):
            for model in self.models.keys() & {item.model for item in batch.items}:
                keys = self.models[model].keys_of(*OPS[batch.op].components)
                assert self.workers.loaded[rank].issuperset(keys), f"{batch.op} of {model} has no weights"

    def check_slots(self) -> None:
        """No more requests run than there are slots, but for those that had made all of their steps, and that a death
        has set back to one.
        """
        running = self.scheduler._requests.running
        self._without_steps.update(request.id for request in running if not _has_slot(request))
        begun = [each for each in running if _has_slot(each) and each.id not in self._without_steps]
        assert len(begun) <= self.config.max_num_seqs, "more requests run than there are slots"
        is_set_back = any(_has_slot(each) and each.id in self._without_steps for each in running)
        assert not is_set_back or self.workers.num_deaths, "a request has steps again, and no rank has died"

    def check_ends(self) -> None:
        """Each request has had one terminal message, and the policy has forgotten it."""
        assert sorted(self.ended) == sorted(self.added), "each has exactly one terminal message"
        groups, homes, repeated = self.policy._groups, self.policy._homes, self.policy._repeated
        assert not self.policy._predictions._known
        assert not groups._places
        assert not groups._large
        assert not homes._ranks
        assert not homes._costs
        assert not repeated._batches


def _models(random: Random, *, has_pages: bool) -> dict[str, ModelInfo]:
    """One to three models, which share their VAE, and most times their text encoder."""
    names, shared = "abc"[: random.choice([1, 2, 3, 3])], random.choice([[VAE], [TEXT_ENCODER, VAE]])
    return {name: _model(name, shared, has_pages=has_pages) for name in names}


def _model(name: str, shared: Sequence[ModelKey], *, has_pages: bool) -> ModelInfo:
    has = {each.component for each in shared}
    own = [ModelKey(name, kind) for kind in ("text_encoder", "transformer", "vae") if kind not in has]
    # The pages of a and b are equal, as those of a model are that is served twice, once with its weights on the host.
    scheme = msgspec.structs.replace(SCHEME, fingerprint="c" if name == "c" else "ab") if has_pages else None
    return msgspec.structs.replace(MODEL, name=name, components=(*shared, *own), page_scheme=scheme)


def _components(info: ModelInfo) -> list[LoadedComponent]:
    return [LoadedComponent(key, COMPONENT_BYTES) for key in info.components]


def _config(random: Random, num_ranks: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=random.choice([1, 2, 3, 8]),
        max_plans_in_flight=random.choice([1, 2, 3]),
        max_ahead_ms=random.choice([0.0, 50.0, 1e6]),
        max_retries=random.choice([100, 100, 3]),
        model_bytes=random.choice([0, 0, 3, 4, 5]) * COMPONENT_BYTES,
        degree=min(num_ranks, random.choice([1, 1, 1, 1, 2])),
        max_degree=random.choice([64, 64, 2, 1]),
        on_late=random.choice(["drop", "last"]),
    )


def _samples(random: Random, models: Iterable[str]) -> list[CostSample]:
    """What steps and decodings take: nothing is known, or it is plausible, or absurd."""
    scale, found = random.choice([0.0, 1.0, 1.0, 1e-6, 1e4]), list[CostSample]()
    for name in models if scale else ():
        for tokens, of_degree in SECONDS.items():
            for degree, seconds in of_degree.items():
                work = Work.of([tokens])
                found.append(CostSample(name, "denoise", work, scale * seconds, True, degree))
            two = random.choice([1, 2]) * of_degree[1]
            found.append(CostSample(name, "denoise", Work.of([tokens, tokens]), scale * two, True))
        found.append(CostSample(name, "decode", Work.of([256]), scale * 0.1, True))
    return found


def _has_slot(request: Request) -> bool:
    return request.progress.steps_left > 0 or request.workflow.has_own_ports


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends(seed: int) -> None:
    _run(seed)


@pytest.mark.parametrize("seed", [92, 98, 139, 144, 177, 178, 215, 228])
def test_every_request_ends_while_models_move(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for is forgotten so soon that models get further ranks within seconds."""
    monkeypatch.setattr(copies, "MEMORY_SECONDS", 2.0)
    assert _run(seed).num_copies


def _run(seed: int) -> Stress:
    random = Random(seed)
    stress = Stress(random)
    with compared(stress.policy):
        stress.run(random.randint(1, 16))
    stress.check_ends()
    return stress
