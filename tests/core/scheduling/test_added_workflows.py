"""Workflows that come and go while a scheduler runs others."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest
from ranks_that_die import DIED, Site
from run_workflows import CLASSES, DIAMOND, random_workflow, run_request

from core.failure import Failure
from core.graph.workflow import Workflow
from core.handles import ModelKey
from core.messages.engine import Failed, Finished
from core.messages.worker import LoadWorkflow, ModelFailed
from core.run_class import RunClass
from core.scheduling.policies import make_policy
from core.scheduling.policies.planner.default import Default

BY_NAME = {each.name: each for each in CLASSES}


def version(workflow: Workflow, number: int) -> tuple[Workflow, list[RunClass]]:
    """A workflow with classes that no other version has."""
    nodes = tuple(replace(node, role=f"{node.role}-{number}") for node in workflow.nodes)
    mine = replace(workflow, name=f"{workflow.name}@{number}", nodes=nodes)
    classes = [
        RunClass(name=name, path=f"{BY_NAME[name.rpartition('-')[0]].path}{number}")
        for name in sorted(mine.class_names)
    ]
    return mine, classes


def loaded(site: Site) -> set[str]:
    """The kinds of what ranks have, as the scheduler reports it."""
    return {each.key.component for rank in site.scheduler.stats().ranks for each in rank.resident_models}


def settle(site: Site) -> None:
    """Let ranks finish what they load and drop."""
    for _ in range(20):
        site.step()
    site.check()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_a_dropped_workflow_has_loaded_is_dropped(num_ranks: int) -> None:
    site = Site(Random(0), num_ranks, Default())
    workflow, classes = version(DIAMOND, 1)
    site.scheduler.add_workflow(workflow, classes)
    for number in range(3):
        site.scheduler.add(run_request(str(number), workflow))
    site.finish()
    assert [type(output) for output in site.outputs] == [Finished] * 3
    settle(site)
    assert "class" in loaded(site)
    site.scheduler.drop_workflow(workflow.name)
    settle(site)
    assert "class" not in loaded(site)
    site.scheduler.add(run_request("late", workflow))
    site.finish()
    assert not isinstance(site.outputs[-1], Finished)


def test_a_class_that_another_workflow_names_stays() -> None:
    site = Site(Random(0), 1, Default())
    workflow, classes = version(DIAMOND, 1)
    other = replace(workflow, name="other@1")
    for each in (workflow, other):
        site.scheduler.add_workflow(each, classes)
    site.scheduler.add(run_request("first", workflow))
    site.finish()
    num_loads = len(site.workers.loaded)
    site.scheduler.drop_workflow(workflow.name)
    settle(site)
    site.scheduler.add(run_request("second", other))
    site.finish()
    assert isinstance(site.outputs[-1], Finished)
    assert len(site.workers.loaded) == num_loads


def test_what_is_dropped_while_it_loads_is_dropped_when_it_is_there() -> None:
    """Also if it has come back by then: then it stays."""
    for comes_back in (False, True):
        site = Site(Random(0), 1, Default())
        workflow, classes = version(DIAMOND, 1)
        site.scheduler.add_workflow(workflow, classes)
        site.scheduler.add(run_request("first", workflow))
        site.schedule()
        site.workers.run_one(0)
        site.scheduler.abort(["first"])
        site.scheduler.drop_workflow(workflow.name)
        site.schedule()
        if comes_back:
            site.scheduler.add_workflow(workflow, classes)
        settle(site)
        assert ("class" in loaded(site)) == comes_back


@pytest.mark.parametrize("seed", range(6))
def test_versions_come_and_go_while_ranks_die(seed: int) -> None:
    """Each is dropped once its requests are over; all of these finish, and nothing is left of it."""
    random = Random(seed)
    site = Site(random, 3, make_policy("default"))
    live: dict[str, set[str]] = {}  # workflow -> its requests
    for number in range(12):
        workflow, classes = version(random_workflow(random, "w", random.randint(1, 5)), number)
        site.scheduler.add_workflow(workflow, classes)
        live[workflow.name] = {f"{number}-{index}" for index in range(random.randint(1, 3))}
        for request_id in sorted(live[workflow.name]):
            site.scheduler.add(run_request(request_id, workflow))
        site.disturb(random.randint(0, 1))
        for name in [name for name, requests in live.items() if requests <= {*site.ended}]:
            site.scheduler.drop_workflow(name)
            del live[name]
    site.finish()
    assert all(isinstance(output, Finished) for output in site.outputs)
    for name in live:
        site.scheduler.drop_workflow(name)
    settle(site)
    assert "class" not in loaded(site)
    assert not site.scheduler.take_refused()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_classes_are_loaded_before_requests_come(num_ranks: int) -> None:
    site = Site(Random(0), num_ranks, Default())
    workflow, classes = version(DIAMOND, 1)
    site.scheduler.add_workflow(workflow, classes)
    site.scheduler.try_workflow(workflow.name)
    assert site.scheduler.trial_of(workflow.name, site.now) is False
    settle(site)
    assert site.scheduler.trial_of(workflow.name, site.now) is True
    assert "class" in loaded(site)
    site.scheduler.drop_workflow(workflow.name)
    settle(site)
    assert site.scheduler.trial_of(workflow.name, site.now) is True, "nobody waits for one that was dropped"


def test_a_class_that_cannot_be_loaded_is_told_and_tried_again_when_it_comes_back() -> None:
    site = Site(Random(0), 1, Default())
    workflow, classes = version(DIAMOND, 1)
    for _ in range(2):
        site.scheduler.add_workflow(workflow, classes)
        site.scheduler.try_workflow(workflow.name)
        rank, key = next_load_of_a_class(site)
        site.scheduler.apply_load(ModelFailed(rank, key, Failure("config", "it will not")), site.now)
        outcome = site.scheduler.trial_of(workflow.name, site.now)
        assert isinstance(outcome, Failure)
        assert (outcome.kind, outcome.code) == ("invalid_request", "invalid_workflow")
        assert "it will not" in outcome.message
        (told,) = site.scheduler.take_refused()
        assert "it will not" in told, "each time, although the times are the same"
        site.scheduler.drop_workflow(workflow.name)
        settle(site)


def test_a_class_whose_load_ends_a_rank_is_told() -> None:
    site = Site(Random(0), 2, Default())
    workflow, classes = version(DIAMOND, 1)
    site.scheduler.add_workflow(workflow, classes)
    site.scheduler.try_workflow(workflow.name)
    rank, _ = next_load_of_a_class(site)
    site.workers.lose(rank)
    site.scheduler.lose_rank(rank, DIED, site.now, is_fast=True)
    outcome = site.scheduler.trial_of(workflow.name, site.now)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "run_failed"


def test_where_bytes_are_limited_nothing_is_loaded_for_a_trial() -> None:
    site = Site(Random(0), 1, Default(), model_bytes=10**9)
    workflow, classes = version(DIAMOND, 1)
    site.scheduler.add_workflow(workflow, classes)
    site.scheduler.try_workflow(workflow.name)
    assert site.scheduler.trial_of(workflow.name, site.now) is True
    settle(site)
    assert "class" not in loaded(site)


def next_load_of_a_class(site: Site) -> tuple[int, ModelKey]:
    """A rank and the class that it is told to load; it has loaded what came before, and does not load this."""
    for _ in range(10):
        site.schedule()
        for rank in range(site.workers.num_ranks):
            site.answer(rank)
        for each in site.workers.loading:
            if each[1].component == "class":
                site.workers.loading.remove(each)
                return each
        site.finish_loads_and_copies()
    raise AssertionError("no class is loaded")


def test_a_message_carries_the_text_of_classes_once() -> None:
    workflow, classes = version(DIAMOND, 1)
    own = [replace_text(each) for each in classes]
    load = LoadWorkflow.of(workflow, own)
    assert load.whole_classes == tuple(own)
    assert {each.source for each in load.classes} == {""}


def replace_text(each: RunClass) -> RunClass:
    return RunClass(name=each.name, path=f"own_1:{each.name.title().replace('-', '')}", source="text", file="own.py")


def test_declared_bytes_are_expected() -> None:
    site = Site(Random(0), 1, Default())
    workflow, classes = version(DIAMOND, 1)
    large = [RunClass(name=each.name, path=each.path, nbytes=123) for each in classes]
    site.scheduler.add_workflow(workflow, large)
    residency = site.scheduler.ranks.residency
    assert {residency.size_of(each.key) for each in large} == {123}
    site.scheduler.drop_workflow(workflow.name)
    settle(site)
    assert {residency.size_of(each.key) for each in large} == {0}


def test_a_refusal_calls_a_version_as_users_do() -> None:
    workflow, classes = version(DIAMOND, 1)
    site = Site(Random(0), 1, Default())
    site.scheduler.add_workflow(workflow, classes)
    asked = run_request("0", workflow)
    site.scheduler.add(msgspec.structs.replace(asked, spec=msgspec.structs.replace(asked.spec, outputs={})))
    site.step()
    (failed,) = site.outputs
    assert isinstance(failed, Failed)
    assert failed.failure.message.startswith("workflow diamond takes memory")
