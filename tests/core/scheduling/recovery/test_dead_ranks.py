"""Ranks that die at any moment: every request ends once with what it makes undisturbed, and no dead rank is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from random import Random

import msgspec
import pytest
from any_ranks import AnyRanks, in_workflow, toy_op
from fakes import make_edit, make_hires_edit
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_that_die import DIED, Site, alone, check_finished, checkpoints_every, make_site, run_until
from workflows import ACCEPTANCE, workflows

from core.graph.workflow import Workflow
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.messages.engine import EngineRequest, Failed
from core.messages.worker import StepPlan
from core.scheduling.policies.planner.default import Default
from core.scheduling.view import View


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_op():
        yield


@settings(deadline=None)
@given(
    st.lists(workflows(), min_size=1, max_size=3),
    st.data(),
    st.integers(0, 1 << 30),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([1, 2, None]),
)
def test_any_workflow_on_any_ranks_survives_their_deaths(
    drawn: list[Workflow], data: st.DataObject, seed: int, num_ranks: int, num_deaths: int, rounds: int | None
) -> None:
    served = [Workflow(f"random{i}", w.nodes, w.outputs, w.regions) for i, w in enumerate(drawn)]
    random = Random(seed)
    site = Site(random, num_ranks, AnyRanks(random), served)
    requests = [
        in_workflow(str(index), workflow, [data.draw(st.integers(1, 4)) for _ in workflow.regions], index % 3)
        for index, workflow in enumerate(
            data.draw(st.lists(st.sampled_from([*served, INPAINT]), min_size=1, max_size=6))
        )
    ]
    for request in requests:
        site.scheduler.add(request)
    with checkpoints_every(rounds):
        site.disturb(num_deaths)
        site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in requests)
    for request in requests:
        assert site.made(request) == alone(request, served)


@settings(deadline=None)
@given(st.data(), st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 6))
def test_edits_end_once_whatever_dies_fails_or_is_aborted(
    data: st.DataObject, seed: int, num_ranks: int, num_deaths: int
) -> None:
    """With the default policy. Those that are not aborted and do not fail tell all their previews and finish."""
    site = Site(Random(seed), num_ranks, Default(), (ACCEPTANCE,), max_num_seqs=3)
    requests = [draw_edit(data, str(number)) for number in range(data.draw(st.integers(1, 6)))]
    aborted = {request.request_id for request in requests if data.draw(st.integers(0, 4)) == 0}
    failing = {request.request_id for request in requests if data.draw(st.integers(0, 6)) == 0}
    for request in requests:
        site.scheduler.add(request)
    site.disturb(num_deaths // 2)
    site.scheduler.abort(aborted)
    site.workers.fail |= failing
    site.disturb(num_deaths - num_deaths // 2)
    site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in requests)
    for request in requests:
        if request.request_id not in aborted | failing:
            check_finished(site, request, (ACCEPTANCE,))


def draw_edit(data: st.DataObject, name: str) -> EngineRequest:
    kind = data.draw(st.sampled_from([INPAINT, HIRES, ACCEPTANCE]))
    if kind is HIRES:
        return make_hires_edit(name, steps=data.draw(st.integers(2, 6)))
    return in_workflow(name, kind, [data.draw(st.integers(1, 6)) for _ in kind.regions], data.draw(st.integers(0, 2)))


# ------------------------------------------------------------------------------------------------------ one by one


def ranks_of_steps(site: Site, request_id: str) -> Callable[[], set[int]]:
    """The ranks that steps of a request are sent to from now on."""
    ranks: set[int] = set()
    submit = site.workers.submit

    def note(plan: StepPlan) -> None:
        for batch in plan.batches:
            if batch.op == "denoise" and request_id in {item.request_id for item in batch.items}:
                ranks.update(batch.ranks)
        submit(plan)

    site.workers.submit = note  # type: ignore[method-assign]
    return lambda: ranks


def test_the_other_rank_goes_on_while_one_is_dead_and_a_newcomer_goes_to_it_when_it_joins() -> None:
    site, long, short = make_site(2), make_edit("long", steps=40), make_edit("short", steps=3)
    site.scheduler.add(long)
    run_until(site, lambda: site.workers.steps_done("long") == 5)
    ranks = ranks_of_steps(site, "long")
    site.kill(0)
    site.scheduler.add(short)
    run_until(site, lambda: "short" in site.ended and site.workers.steps_done("long") == 20)
    assert ranks() == {1}
    site.join(0)
    newcomer = make_edit("newcomer", steps=10)
    others = ranks_of_steps(site, "newcomer")
    site.scheduler.add(newcomer)
    run_until(site, lambda: site.workers.steps_done("long") == 30)
    assert ranks() == {1}
    assert others() == {0}
    site.finish()
    for request in (long, short, newcomer):
        check_finished(site, request)


def test_with_its_only_rank_dead_an_engine_keeps_requests_and_answers_aborts() -> None:
    site = make_site(1)
    for name in ("running", "aborted"):
        site.scheduler.add(make_edit(name, steps=20))
    run_until(site, lambda: site.workers.steps_done("aborted") == 3)
    site.kill(0)
    site.scheduler.add(make_edit("waiting"))
    assert site.scheduler.schedule(0.0) is None
    assert (site.scheduler.counts, site.scheduler.load_report().num_ranks) == ((2, 1), 0)
    site.scheduler.abort(["aborted"])
    site.check()
    assert site.ended == ["aborted"]
    site.finish()
    assert sorted(site.ended) == ["aborted", "running", "waiting"]


def test_steps_that_are_repeated_are_counted() -> None:
    site = make_site(1)
    site.scheduler.add(make_edit("a", steps=8))
    run_until(site, lambda: site.workers.steps_done("a") == 3)
    done = site.scheduler._requests["a"].progress.done["denoise"]
    site.kill(0)
    assert site.scheduler.stats().steps_repeated == done
    site.finish()
    assert site.scheduler.stats().steps_repeated == done
    assert site.scheduler.stats().ranks[0].deaths == 1


def test_a_death_teaches_the_cost_model_nothing() -> None:
    """The other rank of a batch went on alone, which is not what a batch on two ranks costs."""
    site = Site(Random(0), 2, OnBoth())
    site.scheduler.add(make_edit("a", steps=4))
    site.schedule()
    site.answer(1)
    before = site.scheduler.cost.lines()
    site.kill(0)
    assert site.scheduler.cost.lines() == before
    site.finish()
    assert site.ended == ["a"]


class OnBoth(AnyRanks):
    """Runs every batch on all ranks that live."""

    def __init__(self) -> None:
        super().__init__(Random(0))

    def _ranks(self, view: View) -> tuple[int, ...]:
        return view.ranks


# ------------------------------------------------------------------------------------------------------ poison


def kill_whoever_runs(site: Site, poison: str) -> None:
    """Run to the end; a rank dies when it begins a batch with this request."""
    while site.scheduler.num_requests:
        site.schedule()
        for rank in list(site.scheduler.ranks.up):
            plan = next(iter(site.workers.queues[rank]), None)
            first = next((batch for batch in plan.batches if rank in batch.ranks), None) if plan else None
            if first is not None and poison in {item.request_id for item in first.items}:
                site.kill(rank)
            else:
                site.answer(rank)
        for rank in sorted(site.workers.dead):
            site.join(rank)
    site.finish()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("max_retries", [0, 1, 2, 3])
def test_a_request_that_kills_ranks_fails_and_takes_no_other_with_it(num_ranks: int, max_retries: int) -> None:
    site = make_site(num_ranks, max_retries=max_retries, max_plans_in_flight=1)
    others = [make_edit(f"r{number}", steps=6 + number) for number in range(3)]
    for request in others:
        site.scheduler.add(request)
    run_until(site, lambda: site.workers.steps_done("r0") == 2)
    site.scheduler.add(make_edit("poison", steps=4))
    kill_whoever_runs(site, "poison")
    assert site.workers.num_deaths == max_retries + 1
    told = {output.request_id: output for output in site.outputs}
    poison = told["poison"]
    assert isinstance(poison, Failed)
    assert poison.failure.kind == "rank_dead"
    assert poison.failure.message.endswith(f"(retries allowed: {max_retries}): {DIED.message}")
    for request in others:
        check_finished(site, request)


def test_what_ran_in_two_deaths_waits_for_others_and_then_runs_alone() -> None:
    site = make_site(1, max_retries=5, max_plans_in_flight=1)
    for name in ("a", "b"):
        site.scheduler.add(make_edit(name, steps=10))
    for _ in range(2):
        run_until(site, lambda: site.scheduler._requests["b"].progress.done["denoise"] == 4)
        site.schedule()
        site.kill(0)
        site.join(0)
    assert site.scheduler.counts == (0, 2), "both were in these batches, and neither runs"
    site.scheduler.add(make_edit("later", steps=10, arrival=1.0))
    batches: list[set[str]] = []
    submit = site.workers.submit

    def note(plan: StepPlan) -> None:
        batches.extend({item.request_id for item in batch.items} for batch in plan.batches)
        submit(plan)

    site.workers.submit = note  # type: ignore[method-assign]
    site.finish()
    assert site.ended == ["a", "b", "later"]
    assert all(len(batch) == 1 for batch in batches)
    assert [name for name, _ in groupby(batches)] == [{"a"}, {"b"}, {"later"}]


def test_a_rank_that_dies_idle_blames_nobody() -> None:
    site = make_site(2, max_retries=0)
    site.scheduler.add(make_edit("a", steps=10))
    run_until(site, lambda: site.workers.steps_done("a") == 3)
    for _ in range(5):
        site.kill(1)
        site.join(1)
    site.finish()
    check_finished(site, make_edit("a", steps=10))


def test_a_request_that_comes_with_deaths_has_fewer_left() -> None:
    site = make_site(1, max_retries=2)
    site.scheduler.add(msgspec.structs.replace(make_edit("a", steps=10), num_deaths=2))
    run_until(site, lambda: site.workers.steps_done("a") == 3)
    site.kill(0)
    (failed,) = site.outputs
    assert isinstance(failed, Failed)
    assert "3 workers died" in failed.failure.message
