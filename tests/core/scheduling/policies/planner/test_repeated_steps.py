"""RepeatedSteps: a batch is made again only where a whole pass would choose it, too."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random

import msgspec
import pytest
from both_passes import Batches, compared
from fakes import make_edit, make_hires_edit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks_that_die import Site, check_finished, run_until

from core.graph.work import Work
from core.messages.worker import CostSample
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.planner.plan import Plan
from core.scheduling.policies.planner.repeated_steps import Keeps, RepeatedSteps
from core.scheduling.view import View


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 4), st.integers(1, 8))
@example(1402, 2, 2, 3)  # a request moves to another rank
@example(2134, 2, 4, 7)  # one waits again that has made all of its steps
@example(3, 1, 4, 2)  # one that had to run alone is given up
def test_a_repeated_batch_is_what_a_whole_pass_would_choose(
    seed: int, num_ranks: int, num_deaths: int, most: int
) -> None:
    random, policy = Random(seed), Default()
    site = Site(random, num_ranks, policy, max_num_seqs=most)
    with compared(policy):
        for number in range(random.randint(1, 8)):
            steps, previews = random.randint(2, 20), random.choice([0, 0, 1, 2])
            edit = make_edit(f"{number}", steps=steps, partial_images=previews)
            hires = make_hires_edit(f"{number}", steps=steps)
            made = random.choice([edit, edit, hires])
            objective = random.choice([None, 0.0, random.uniform(0.0, 100.0)])
            site.scheduler.add(msgspec.structs.replace(made, objective=objective))
            for _ in range(random.randint(0, 6)):
                site.step()
        site.disturb(num_deaths)
        site.finish()


def test_most_passes_of_a_long_request_are_repetitions() -> None:
    policy = Default()
    site = Site(Random(0), 2, policy, max_plans_in_flight=1)
    with compared(policy) as were_repeated:
        site.scheduler.add(make_edit("a", steps=40))
        site.finish()
    assert sum(were_repeated) >= 35


def profile() -> Iterator[CostSample]:
    """Two requests that share a step take hardly longer than one."""
    for tokens in (64, 1024):
        for rows, seconds in ((1, 1.0), (2, 1.1)):
            yield CostSample("m", "denoise", Work.of([tokens] * rows), seconds, is_profile=True)


def test_steps_are_repeated_while_another_rank_prepares_a_request() -> None:
    policy = Default()
    site = Site(Random(0), 2, policy, max_plans_in_flight=1)
    site.scheduler.learn(profile())
    site.scheduler.add(make_edit("a", steps=40))
    run_until(site, lambda: site.workers.steps_done("a") >= 5)
    (rank,) = site.scheduler._requests["a"].ranks
    with compared(policy) as were_repeated:
        site.scheduler.add(make_edit("b", steps=40))
        for _ in range(10):
            site.schedule()
            site.answer(rank)
    assert site.scheduler._requests["b"].ranks == {1 - rank}
    assert site.workers.steps_done("b") == 0
    assert sum(were_repeated) >= 8


def test_steps_of_a_request_without_a_slot_are_not_repeated() -> None:
    """It went on to make room, which may be there now."""
    site, find, found = Site(Random(0), 2, Default(), max_plans_in_flight=1), RepeatedSteps.next, list[object]()
    site.scheduler.add(make_edit("a", steps=40))
    run_until(site, lambda: site.workers.steps_done("a") >= 5)

    def asked(
        self: RepeatedSteps, view: View, plan: Plan, large: Collection[str], moving: frozenset[int], keeps: Keeps
    ) -> Batches:
        if again := find(self, view, plan, large, moving, keeps):
            found.append(find(self, view, Plan(), large, moving, keeps))
        return again

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RepeatedSteps, "next", asked)
        run_until(site, lambda: site.workers.steps_done("a") >= 15)
    assert len(found) >= 8
    assert set(found) == {None}


def test_steps_of_a_dead_ranks_request_go_on_elsewhere() -> None:
    site = Site(Random(0), 2, Default(), max_plans_in_flight=1)
    requests = [make_edit(name, steps=40) for name in "ab"]
    for request in requests:
        site.scheduler.add(request)
    run_until(site, lambda: site.workers.steps_done("a") >= 5)
    (rank,) = site.scheduler._requests["a"].ranks
    site.kill(rank)
    run_until(site, lambda: len(site.ended) == 2)
    for request in requests:
        check_finished(site, request)


def test_steps_that_ranks_share_are_made_once() -> None:
    policy = Default()
    site, request = Site(Random(0), 2, policy, degree=2), make_edit("a", steps=10)
    site.scheduler.add(request)
    with compared(policy):
        site.finish()
    check_finished(site, request)


def test_a_request_does_not_wait_for_a_plan_while_a_rank_is_free() -> None:
    """That a plan was made just before puts off another one only while all ranks go on: else the next pass may come
    much later, when the first of the others answers.
    """
    site = Site(Random(0), 6, Default(), max_plans_in_flight=1)
    for name in "abcdef":
        site.scheduler.add(make_edit(name, steps=200))
    run_until(site, lambda: all(site.workers.steps_done(name) >= 1 for name in "abcdef"))
    for aborted, newcomer in ("ag", "bh", "ci"):
        site.schedule()
        (rank,) = site.scheduler._requests[aborted].ranks
        site.scheduler.abort([aborted])
        site.scheduler.add(make_edit(newcomer))
        while not site.answer(rank):  # plans that have no work for it
            assert site.workers.queues[rank]
        site.schedule()
        assert site.scheduler._requests[newcomer].ranks == {rank}


def test_steps_are_repeated_where_all_requests_are_large() -> None:
    """Each has a rank, and the third one begins when the first has made its last step."""
    policy = Default()
    site = Site(Random(0), 2, policy, max_plans_in_flight=1, max_num_seqs=2)
    for rows in (1, 2):
        work = Work.of([1048] * rows)
        site.scheduler.learn([CostSample("m", "denoise", work, 4.0 * rows, is_profile=True)])
    for name, number in (("first", 20), ("second", 60), ("third", 60)):
        site.scheduler.add(make_edit(name, steps=number, num_tokens=1024))
    with compared(policy) as were_repeated:
        run_until(site, lambda: site.workers.steps_done("first") >= 3)
        assert policy._apart == {"first", "second", "third"}
        were_repeated.clear()
        run_until(site, lambda: site.workers.steps_done("first") >= 15)
        assert sum(were_repeated) > 0.8 * len(were_repeated) > 8
        run_until(site, lambda: site.workers.steps_done("third") >= 1)
        assert site.workers.steps_done("second") < 60
    site.finish()


def test_no_steps_are_repeated_on_too_few_ranks() -> None:
    """Steps take longer than predicted, so that one request needs the other's rank to be in time."""
    policy = Default()
    site = Site(Random(0), 2, policy, max_plans_in_flight=1)
    for rows, degree, seconds in ((1, 1, 4.0), (2, 1, 8.0), (1, 2, 2.6)):
        work = Work.of([1048] * rows)
        site.scheduler.learn([CostSample("m", "denoise", work, seconds, True, degree)])
    for name, objective in (("due", 100.0), ("other", None)):
        made = make_edit(name, steps=20, num_tokens=1024)
        site.scheduler.add(msgspec.structs.replace(made, objective=objective))
    with compared(policy) as were_repeated:
        for _ in range(14):
            for rank in (0, 1):
                site.answer(rank)
            site.schedule()
            site.now += 6.0
    assert site.scheduler._requests["due"].step_ranks == (0, 1)
    assert any(were_repeated)
