"""A router whose engines serve different models, while some of them are down or given up."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from fakes import MODEL, make_edit, with_spec
from run_workflows import CLASSES, DIAMOND, run_request

from core.config import EngineConfig, ModelConfig, StencilConfig
from core.errors import EngineDeadError, ModelUnavailableError, StencilError
from core.failure import Failure
from core.late_adapters import LateAdapters
from core.messages.engine import AdaptersUsed, DropTemplate, EngineRequest, Failed, Output, PartialImage, UseAdapters
from core.patches import Patch
from engine.observability.metrics import Metrics
from engine.router.engine_backend import EngineBackend
from engine.router.engine_client import Waiter
from engine.router.router import Router

DEAD = EngineDeadError("it died")


class Replica:
    """Stands for an EngineReplica that was started."""

    def __init__(self, config: EngineConfig, backend: EngineBackend, watcher: Router) -> None:
        self.rank, self.is_alive = config.data_parallel_rank, True
        self.model_names = tuple(model.name for model in config.models)
        self.error: StencilError | None = None
        self.is_draining = self.is_leaving = False
        self.sent: dict[str, Waiter] = {}
        self.messages: dict[str, EngineRequest] = {}  # that were sent, by id
        self.used: list[UseAdapters] = []
        self.dropped: list[DropTemplate] = []
        self.watcher = watcher

    def submit(self, request: EngineRequest, waiter: Waiter) -> None:
        self.sent[request.request_id], self.messages[request.request_id] = waiter, request

    def use_adapters(self, use: UseAdapters) -> None:
        self.used.append(use)

    def drop(self, template: DropTemplate) -> None:
        self.dropped.append(template)

    def die(self) -> None:
        self.is_alive = False
        self.watcher.on_down(self.rank, DEAD)
        sent, self.sent = self.sent, {}
        for request_id, waiter in sent.items():
            waiter(Failed(request_id, Failure.of(DEAD)))

    def give_up(self) -> None:
        self.die()
        self.error = DEAD
        self.watcher.on_given_up(self.rank)

    def serve(self) -> None:
        self.is_alive = True
        self.watcher.on_up(self.rank)


class Site:
    """Engine 0 has the models a and both, engine 1 has b and both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.router.engines.EngineReplica", Replica)
        names = ("a", "b", "both")
        models = tuple(ModelConfig(served_model_name=name) for name in names)
        engines = {0: ("a", "both"), 1: ("b", "both")}
        classes = {"classes": CLASSES, "workflows": (DIAMOND,)}
        config = EngineConfig(models=models, engines=engines, data_parallel_size=2, **classes)
        self.router = Router(StencilConfig(engine=config), cast(EngineBackend, None), Metrics())
        self.router.engines.models = {name: msgspec.structs.replace(MODEL, name=name) for name in names}
        self.first, self.second = cast(list[Replica], self.router.engines.replicas.values())
        self.told: dict[str, Output] = {}

    def submit(self, name: str, model: str) -> None:
        edit = msgspec.structs.replace(make_edit(name), model=model)
        self.router.submit(edit, lambda output: self.told.setdefault(name, output) and None)

    def submit_run(self, name: str) -> None:
        run = run_request(name, DIAMOND)
        self.router.submit(run, lambda output: self.told.setdefault(name, output) and None)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def test_requests_go_to_engines_that_serve_their_model(site: Site) -> None:
    for number in range(3):
        site.submit(f"a{number}", "a")
        site.submit(f"b{number}", "b")
    assert [*site.first.sent] == ["a0", "a1", "a2"]
    assert [*site.second.sent] == ["b0", "b1", "b2"]
    for template in (DropTemplate("a", "0", ""), DropTemplate("both", "0", "")):
        site.router.drop(template)
    assert [each.model for each in site.first.dropped] == ["a", "both"]
    assert [each.model for each in site.second.dropped] == ["both"]


def test_runs_go_to_any_engine_until_the_last_is_given_up(site: Site) -> None:
    for number in range(2):
        site.submit_run(f"{number}")
    assert (len(site.first.sent), len(site.second.sent)) == (1, 1)
    site.first.give_up()
    site.submit_run("2")
    assert {*site.second.sent} == {"0", "1", "2"}, "also that of the engine which is gone"
    site.second.die()
    assert (site.told, site.router.num_waiting) == ({}, 3)
    site.second.serve()
    assert {*site.second.sent} == {"0", "1", "2"}
    site.second.give_up()
    assert [each.failure.kind for each in site.told.values() if isinstance(each, Failed)] == ["engine_dead"] * 3
    with pytest.raises(EngineDeadError):
        site.submit_run("3")


def test_a_request_waits_for_the_only_engine_that_serves_its_model(site: Site) -> None:
    site.submit("1", "b")
    site.second.die()
    assert (site.told, site.router.num_waiting) == ({}, 1)
    assert site.router.engines.is_ready
    assert not site.router.engines.is_served("b")
    assert site.router.engines.is_served("both")
    site.submit("2", "both")
    assert [*site.first.sent] == ["2"]
    site.second.serve()
    assert [*site.second.sent] == ["1"]


def test_a_request_that_is_sent_again_has_its_late_adapters_from_the_same_step_on(site: Site) -> None:
    hat = (Patch("hat"),)
    for name in ("told", "shown", "waiting"):
        edit = msgspec.structs.replace(with_spec(make_edit(name), late=LateAdapters(most=5)), model="b")
        site.router.submit(edit, lambda output: None)
    site.second.sent["shown"](PartialImage(request_id="shown", index=0, step=3))
    site.router.use_adapters(["told", "gone"], hat)
    assert site.second.used == [UseAdapters(request_id="told", patches=hat)]
    site.second.sent["told"](AdaptersUsed(request_id="told", step=2))
    site.second.sent["told"](PartialImage(request_id="told", index=0, step=4))
    site.second.die()
    site.router.use_adapters(["waiting"], hat)
    site.second.serve()
    sent = {name: message.spec for name, message in site.second.messages.items()}
    assert sent["told"].late == LateAdapters(most=2, least=2, are_loaded=True)
    assert sent["shown"].late == LateAdapters(most=5, least=3)
    assert sent["waiting"].late == LateAdapters(most=5, are_loaded=True)
    assert [sent[name].patches for name in ("told", "shown", "waiting")] == [hat, (), hat]
    assert len(site.second.used) == 1
    site.second.give_up()


def test_a_model_whose_engines_are_given_up_is_refused_and_the_others_go_on(site: Site) -> None:
    site.submit("1", "b")
    site.submit("2", "a")
    site.second.give_up()
    told = site.told["1"]
    assert isinstance(told, Failed)
    assert told.failure.kind == "model_unavailable"
    assert site.router.engines.error is None
    with pytest.raises(ModelUnavailableError, match="no engine is left that serves b"):
        site.submit("3", "b")
    site.submit("4", "both")
    assert [*site.first.sent] == ["2", "4"]
    site.first.give_up()
    failed = [site.told[name] for name in ("2", "4")]
    assert [each.failure.kind for each in failed if isinstance(each, Failed)] == ["engine_dead"] * 2
    with pytest.raises(EngineDeadError):
        site.submit("5", "a")
