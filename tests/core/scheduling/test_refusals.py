"""Requests and models whose batches end ranks: who fails, who goes on, and when a model is tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from cache_kit import LAYOUT, ROOMY, SCHEME, make_masked
from fakes import MODEL, FakePages, FakeWorkers, apply, make_edit

from core.config import SchedulerConfig
from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import Failed, Finished, Output, PrimeTemplate
from core.messages.worker import Batch
from core.model_info import ModelInfo
from core.scheduling.ranks import quarantine
from core.scheduling.ranks.quarantine import FIRST_WAIT_SECONDS
from core.scheduling.scheduler import StepScheduler

DIED = Failure("engine_dead", "worker 0 died (killed by signal 11)")
SHARED = tuple(ModelKey("0", kind) for kind in ("text_encoder", "vae"))
MODELS = {
    name: msgspec.structs.replace(MODEL, name=name, components=(*SHARED, ModelKey(name, "transformer")))
    for name in ("a", "b")
}


class Rig:
    """A scheduler with two models on ranks that die soon after their start, when they begin a batch that `kills`."""

    def __init__(self, num_ranks: int, kills: Callable[[Batch], bool], models: dict[str, ModelInfo] = MODELS) -> None:
        self.scheduler = StepScheduler(SchedulerConfig(max_plans_in_flight=1), models, num_ranks, ROOMY)
        self.workers = FakeWorkers(num_ranks, pages=FakePages(LAYOUT.num_blocks))
        self.kills = kills
        self.now = 0.0
        self.told: dict[str, Output] = {}
        self.said: list[str] = []
        self.components = [LoadedComponent(key, 1) for info in MODELS.values() for key in info.components]
        self.scheduler.learn((), [(rank, self.components) for rank in range(num_ranks)])

    def add(self, name: str, of: str = "a", steps: int = 4) -> None:
        """The first letter of its name is its owner's. "_": nobody knows whose it is."""
        head = make_edit(name, steps=steps, owner=name[0].strip("_"), arrival=self.now)
        self.scheduler.add(msgspec.structs.replace(head, model=of))

    def run(self, *names: str, of: str = "a") -> None:
        """Add these, and run until all requests have ended."""
        for name in names:
            self.add(name, of)
        while self.scheduler.num_requests:
            self.step()
        self.take()
        self.scheduler.check_integrity()

    def submit(self) -> None:
        """Schedule all that can be."""
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        while plan is not None:
            self.workers.submit(plan)
            plan = self.scheduler.schedule(self.now, again=True)

    def step(self) -> None:
        self.submit()
        for rank in self.scheduler.ranks.up:
            plan = next(iter(self.workers.queues[rank]), None)
            first = next((batch for batch in plan.batches if rank in batch.ranks), None) if plan else None
            if first is not None and self.kills(first):
                self.kill(rank)
            else:
                for result in self.workers.run_one(rank):
                    apply(self.scheduler, result)
        self.take()

    def kill(self, rank: int, *, is_fast: bool = True) -> None:
        self.workers.lose(rank)
        self.scheduler.lose_rank(rank, DIED, self.now, is_fast=is_fast)
        self.workers.join(rank)
        self.scheduler.join_rank(rank, self.components)

    def take(self) -> None:
        self.told |= {each.request_id: each for each in self.scheduler.take_outputs()}
        self.said += self.scheduler.take_refused()

    def ended(self, *names: str) -> list[str]:
        """How these have ended."""
        ends = [self.told[name] for name in names]
        return [each.failure.kind if isinstance(each, Failed) else type(each).__name__ for each in ends]

    def wait(self) -> None:
        self.now = max(each.until for each in self.scheduler.stats().quarantine)


def of_requests(*names: str) -> Callable[[Batch], bool]:
    return lambda batch: batch.op == "denoise" and any(item.request_id in names for item in batch.items)


def of_model(name: str) -> Callable[[Batch], bool]:
    return lambda batch: batch.op == "denoise" and batch.items[0].model == name


def steady(rig: Rig, names: Sequence[str]) -> None:
    """All of these have finished."""
    assert [name for name in names if not isinstance(rig.told[name], Finished)] == []


def test_a_request_that_ends_ranks_again_and_again_fails_alone() -> None:
    rig = Rig(2, of_requests("A1"))
    rig.run("A1", "B1", "C1", "A2")
    rig.run("B2", "A3")
    assert rig.ended("A1") == ["rank_dead"]
    assert rig.workers.num_deaths == 3, "as many as --max-retries allows"
    steady(rig, ["B1", "C1", "A2", "B2", "A3"])
    assert not rig.scheduler.stats().quarantine


def test_two_requests_of_one_owner_leave_the_model_to_everybody_else() -> None:
    rig = Rig(2, of_requests("A1", "A2", "A3"))
    rig.run("A1")
    rig.run("A2", "A4", "B1")
    assert rig.ended("A1", "A2") == ["rank_dead", "model_unavailable"]
    steady(rig, ["B1"])
    rig.run("B2", "C1", "A5")
    steady(rig, ["B2", "C1"])
    assert rig.ended("A5") == ["model_unavailable"]
    rig.run("A6", of="b")
    steady(rig, ["A6"])
    (refused,) = rig.scheduler.stats().quarantine
    assert (refused.model, refused.cause, refused.times) == ("a", "owner_deaths", 1)
    assert rig.scheduler.load_report().refused == {}, "other owners' requests may come"
    assert rig.scheduler.stats().models == {"a": "loaded", "b": "loaded"}
    rig.wait()
    rig.run("A7")
    steady(rig, ["A7"])
    assert not rig.scheduler.stats().quarantine
    rig.run("A3")
    assert rig.ended("A3") == ["model_unavailable"], "at once, and for longer"
    assert [each.until - each.since for each in rig.scheduler.stats().quarantine] == [2 * FIRST_WAIT_SECONDS]


def test_a_model_that_ends_its_only_rank_is_refused_before_the_fifth_death() -> None:
    rig = Rig(1, of_model("a"))
    rig.run("A1", "B1", "C1", "A2")
    assert rig.workers.num_deaths <= 4
    assert set(rig.ended("A1", "B1", "C1", "A2")) <= {"rank_dead", "model_unavailable"}
    (refused,) = [each for each in rig.scheduler.stats().quarantine if each.cause == "deaths"]
    assert (refused.model, refused.times, refused.until - refused.since) == ("a", 1, FIRST_WAIT_SECONDS)
    assert rig.scheduler.load_report().refused == {"a": refused.until}
    assert rig.scheduler.stats().models == {"a": "quarantined", "b": "loaded"}
    text = "the model a is not run for a while, because its batches ended workers: worker 0 died (killed by signal 11)"
    assert f"{text} (for 10 s)" in rig.said
    rig.run("D1")
    failed = rig.told["D1"]
    assert isinstance(failed, Failed)
    assert (failed.failure.message, failed.failure.code) == (text, "deaths")
    assert failed.failure.retry_after == refused.until - rig.now
    rig.run("D2", "A3", of="b")
    steady(rig, ["D2", "A3"])
    assert rig.workers.num_deaths <= 4


def test_without_keys_a_model_that_ends_its_only_rank_is_refused_before_the_fifth_death() -> None:
    rig = Rig(1, of_model("a"))
    rig.run("_1", "_2", "_3")
    assert rig.workers.num_deaths <= 4
    (refused,) = rig.scheduler.stats().quarantine
    assert (refused.model, refused.cause) == ("a", "deaths")
    assert rig.scheduler.load_report().refused == {"a": refused.until}, "the router chooses other engines"
    assert rig.scheduler.stats().models == {"a": "quarantined", "b": "loaded"}
    rig.run("_4")
    failed = rig.told["_4"]
    assert isinstance(failed, Failed)
    text = "the model a is not run for a while, because its batches ended workers: worker 0 died (killed by signal 11)"
    assert (failed.failure.message, failed.failure.code) == (text, "deaths")
    rig.wait()
    rig.kills = lambda batch: False
    rig.run("_5")
    steady(rig, ["_5"])
    assert rig.scheduler.stats().models["a"] == "loaded"
    assert not rig.scheduler.stats().quarantine


def test_a_refused_model_is_tried_again_with_the_next_request() -> None:
    rig = Rig(1, of_model("a"))
    rig.run("A1", "B1")
    rig.wait()
    assert rig.scheduler.stats().models["a"] == "quarantined", "until it has run"
    deaths = rig.workers.num_deaths
    rig.run("C1")
    assert (rig.ended("C1"), rig.workers.num_deaths) == (["model_unavailable"], deaths + 1)
    assert 2 * FIRST_WAIT_SECONDS in [each.until - each.since for each in rig.scheduler.stats().quarantine]
    rig.wait()
    rig.kills = lambda batch: False
    rig.run("A4", "C2")
    steady(rig, ["A4", "C2"])
    assert rig.scheduler.stats().models["a"] == "loaded"


def test_a_refusal_outlasts_the_batches_that_were_in_flight_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "GOOD_BATCHES", 2)
    rig = Rig(4, lambda batch: False)
    for index in range(4):
        rig.add(f"_{index}")
    rig.step()
    rig.submit()
    ops = [[batch.op for batch in queue[-1].batches] for queue in rig.workers.queues]
    assert ops == [["denoise"] * 4] * 4, "one for each rank"
    for rank in (0, 1):
        rig.kill(rank)
    rig.take()
    assert rig.ended("_0", "_1") == ["model_unavailable"] * 2
    assert len(rig.told) == 2, "batches of the other two are in flight"
    rig.run()
    rig.run("_4")
    assert rig.ended("_4") == ["model_unavailable"]
    rig.wait()
    rig.run("_5", "_6")
    steady(rig, ["_5", "_6"])
    assert not rig.scheduler.stats().quarantine


def test_a_request_that_is_sent_again_late_is_judged_now() -> None:
    rig = Rig(1, of_model("a"))
    rig.run("A1", "B1")
    head = msgspec.structs.replace(make_edit("C1", owner="C", arrival=0.0), model="a")
    rig.wait()
    rig.kills = lambda batch: False
    rig.step()
    rig.scheduler.add(head)
    rig.run()
    steady(rig, ["C1"])


def test_priming_that_ends_ranks_is_blamed_on_those_that_wait_for_it() -> None:
    """Edits, and requests for a template."""
    models = {name: msgspec.structs.replace(info, page_scheme=SCHEME) for name, info in MODELS.items()}
    rig = Rig(1, lambda batch: batch.op == "prime", models)
    for name in ("A1", "A2", "B1"):
        head = make_masked(name, content=name, arrival=rig.now)
        rig.scheduler.add(msgspec.structs.replace(head, model="a", owner=name[0]))
        rig.run()
        causes = sorted(each.cause for each in rig.scheduler.stats().quarantine)
        assert causes == {"A1": [], "A2": ["owner_deaths"], "B1": ["deaths", "owner_deaths"]}[name]
    assert rig.ended("A2", "B1") == ["model_unavailable"] * 2
    pixels = make_edit("x").spec.template
    rig.scheduler.add_template(PrimeTemplate("t", "a", pixels, 256, 256, "0", 256, rig.now, owner="C"))
    rig.take()
    assert rig.ended("t") == ["model_unavailable"], "at once"
    rig.now += 3 * FIRST_WAIT_SECONDS
    rig.scheduler.add_template(PrimeTemplate("u", "a", pixels, 256, 256, "0", 256, rig.now, owner="C"))
    rig.run()
    assert rig.ended("u") == ["model_unavailable"], "of its own death"


def test_priming_and_a_step_of_the_same_request_are_one_case() -> None:
    """The request may be the only cause of both."""
    models = {name: msgspec.structs.replace(info, page_scheme=SCHEME) for name, info in MODELS.items()}
    deadly = ["prime", "denoise"]
    rig = Rig(1, lambda batch: bool(deadly) and batch.op == deadly[0] and bool(deadly.pop(0)), models)
    rig.scheduler.add(msgspec.structs.replace(make_masked("A1", content="A1", arrival=rig.now), model="a", owner="A"))
    rig.run()
    assert (rig.workers.num_deaths, deadly) == (2, [])
    steady(rig, ["A1"])
    assert not rig.scheduler.stats().quarantine


def test_a_death_while_only_a_component_is_loaded_fails_its_requests_alone() -> None:
    rig = Rig(1, lambda batch: False)
    rig.components = [each for each in rig.components if each.key.content != "b"]
    rig.kill(0)
    rig.run("A1")
    rig.add("B1", of="b")
    rig.step()
    for is_fast in (False, True):
        assert rig.workers.loading == [(0, ModelKey("b", "transformer"))]
        assert "B1" not in rig.told, "the first may have had other causes"
        rig.kill(0, is_fast=is_fast)
        rig.workers.loading.clear()
        rig.step()
    rig.run("A2")
    steady(rig, ["A1", "A2"])
    assert rig.ended("B1") == ["model_unavailable"]
    assert not rig.workers.loading, "it is not loaded again without a request"
    assert rig.scheduler.stats().models == {"a": "loaded", "b": "failed"}
    assert [(each.model, each.cause) for each in rig.scheduler.stats().quarantine] == [("b", "load")]
