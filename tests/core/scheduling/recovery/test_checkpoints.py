"""Checkpoints: when they are due, what they cost, and how little of a request a death takes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fakes import make_edit, make_hires_edit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks_that_die import Site, check_finished, checkpoints_every, make_site, run_until
from workflows import ACCEPTANCE

from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.messages.engine import EngineRequest
from core.messages.worker import BatchResult, StepPlan, TransferDone
from core.scheduling.policies.papers.neustream import NeuStream
from core.scheduling.policies.planner.default import Default
from core.scheduling.recovery import checkpoints
from core.scheduling.recovery.checkpoints import MAX_ROUNDS, MAX_SHARE, rounds_between
from core.scheduling.values.values import ValueTable


@given(st.integers(1, 4), st.integers(0, 10**8), st.floats(1e-5, 100.0))
def test_checkpoints_are_at_most_so_far_apart_and_cost_at_most_so_much(
    values: int, nbytes: int, seconds: float
) -> None:
    rounds = rounds_between(values, nbytes, seconds)
    cost = values * checkpoints.COPY_SECONDS + nbytes / checkpoints.BYTES_PER_SECOND
    assert rounds >= 1
    assert cost <= 1.001 * MAX_SHARE * rounds * seconds or rounds == 1
    assert rounds <= MAX_ROUNDS or cost > MAX_SHARE * (rounds - 1) * seconds


def test_the_longer_a_step_takes_the_more_often_its_state_is_kept() -> None:
    intervals = [rounds_between(1, 300_000, seconds) for seconds in (0.001, 0.01, 0.1, 1.0, 10.0)]
    assert intervals == sorted(intervals, reverse=True)
    assert (intervals[1], intervals[-1]) == (8, 1)


# ------------------------------------------------------------------------------------------------------ in a scheduler


def note_moves(site: Site) -> list[tuple[str, int]]:
    """(name, version) of the values of steps as they are written to shared memory."""
    moves: list[tuple[str, int]] = []
    submit = site.workers.submit

    def note(plan: StepPlan) -> None:
        moves.extend((each.ref.key.name, each.ref.key.version) for each in plan.transfers)
        submit(plan)

    site.workers.submit = note  # type: ignore[method-assign]
    return moves


def test_the_state_is_written_every_few_steps_and_the_one_before_is_freed() -> None:
    site = make_site(1)
    site.workers.omitted.clear()  # its sampler has a state
    moves = note_moves(site)
    site.scheduler.add(make_edit("a", steps=20))
    run_until(site, lambda: site.workers.steps_done("a") == 19)
    site.schedule()
    assert moves == [("latents", 8), ("sampler", 8), ("latents", 16), ("sampler", 16)]
    values = site.scheduler.values
    assert {key.version for key in values.keys("a") if (value := values.get(key)) and value.exported} == {16}
    site.finish()
    assert values.keys("a") == []


def test_a_run_that_is_over_before_its_first_checkpoint_writes_nothing() -> None:
    site = make_site(1)
    moves = note_moves(site)
    site.scheduler.add(make_edit("a", steps=8))
    site.finish()
    assert moves == []


def test_the_first_of_two_passes_is_not_repeated_once_it_is_over() -> None:
    site, request = make_site(1), make_hires_edit("a", steps=30)
    site.scheduler.add(request)
    progress = site.scheduler._requests["a"].progress
    run_until(site, lambda: progress.done["denoise"] == 5)
    site.kill(0)
    assert (progress.done["first_denoise"], progress.done["denoise"]) == (30, 0)
    site.finish()
    check_finished(site, request)


def test_a_preview_that_is_yet_to_be_shown_survives() -> None:
    """Else the steps before it would be done again, however far the others have come."""
    site = make_site(2)
    request = make_edit("a", steps=20, partial_images=1)  # after step 10
    site.scheduler.add(request)
    progress = site.scheduler._requests["a"].progress
    while progress.done["denoise"] < 18:
        site.schedule()
        site.answer(0)  # the rank that would show it is busy
    site.kill(0)
    while not progress.num_in_flight:
        site.answer(1)
        site.schedule()
    assert progress.done["denoise"] >= 8
    site.finish()
    check_finished(site, request)


def test_without_room_in_the_arena_requests_go_on_without_checkpoints() -> None:
    site, request = make_site(1), make_edit("a", steps=30)
    site.scheduler.values._space = ValueTable(num_bytes=0)._space
    site.scheduler.add(request)
    moves = note_moves(site)
    run_until(site, lambda: site.workers.steps_done("a") == 20)
    assert moves == []
    site.finish()
    check_finished(site, request)


def test_checkpoints_without_room_are_left_out_and_later_ones_are_written() -> None:
    """What a request waits to write is never more than its last state, and half of the arena stays free."""
    site = make_site(1)
    space = site.scheduler.values._space = ValueTable(num_bytes=4 * 64)._space
    names = ("a", "b", "c", "d")
    for name in names:
        site.scheduler.add(make_edit(name, steps=40 if name == "d" else 20))
    requests = site.scheduler._requests
    with checkpoints_every(2):
        while len(site.ended) < 3:
            site.step()
            assert space.used_bytes <= 2 * 64
            assert all(len(requests[name].unwritten) <= 2 for name in names if name in requests)
            assert len(site.scheduler.values.pinned) <= 2 * len(names)
        run_until(site, lambda: site.workers.steps_done("d") == 30)
        assert requests["d"].checkpoints["denoise"].round >= 24
        site.finish()


def test_a_request_that_ends_while_its_state_is_written_ends_once_it_is() -> None:
    site = make_site(1)
    site.scheduler.add(make_edit("a", steps=30))
    run_until(site, lambda: bool(site.scheduler.values.num_moving))
    site.scheduler.abort(["a"])
    assert site.ended == []
    site.finish()
    assert site.ended == ["a"]


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 8), st.sampled_from([1, 3, None]))
def test_a_death_repeats_no_more_steps_than_lie_between_two_checkpoints(
    seed: int, num_ranks: int, num_deaths: int, rounds: int | None
) -> None:
    """And the one that was under way when the last of them was written."""
    random = Random(seed)
    site = Site(random, num_ranks, Default(), (ACCEPTANCE,), max_plans_in_flight=2)
    requests = [draw(random, str(number)) for number in range(random.randint(1, 4))]
    with checkpoints_every(rounds):
        run_all(site, requests, num_deaths)
    for each in site.scheduler.take_resumed():
        assert each.steps_between <= (rounds or MAX_ROUNDS)
        assert each.steps_repeated <= each.steps_between + 1


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 6), st.integers(10, 60))
@example(5, 2, 4, 28)  # copies of what waiting requests read fill it
@example(2091, 2, 4, 10)  # so do values whose rank is gone
def test_a_small_arena_costs_steps_but_no_request(seed: int, num_ranks: int, num_deaths: int, room: int) -> None:
    """room: for so many values, half of it for those that move from rank to rank."""
    random = Random(seed)
    site = Site(random, num_ranks, Default(), (ACCEPTANCE,))
    site.scheduler.values._space = ValueTable(num_bytes=room * 64)._space
    requests = [draw(random, str(number)) for number in range(random.randint(2, 6))]
    with checkpoints_every(1):
        run_all(site, requests, num_deaths)


def test_what_leaves_the_arena_is_not_read_there_any_more() -> None:
    """Other values will lie there; what ranks have is fetched again."""
    site = Site(Random(0), 2, NeuStream(), max_plans_in_flight=1)
    requests = [make_edit("a", steps=40), make_edit("b", steps=40)]
    site.scheduler.add(requests[0])
    run_until(site, lambda: site.workers.steps_done("a") == 3)
    while site.workers.queues[0] or site.workers.queues[1]:
        for rank in (0, 1):
            site.answer(rank)
    first, values = site.scheduler._requests["a"], site.scheduler.values
    assert values.is_in_arena("a")
    site.scheduler.add(requests[1])
    assert site.scheduler._recovery.make_room(site.scheduler._requests["b"])
    assert not values.is_in_arena("a")
    assert not first.fixed_inputs
    site.finish()
    for request in requests:
        check_finished(site, request)


def run_all(site: Site, requests: Sequence[EngineRequest], num_deaths: int) -> None:
    """Run them while ranks die. All finish."""
    for request in requests:
        site.scheduler.add(request)
    site.disturb(num_deaths)
    site.finish()
    for request in requests:
        check_finished(site, request)


def draw(random: Random, name: str) -> EngineRequest:
    steps = random.randint(2, 30)
    if random.choice([INPAINT, HIRES]) is HIRES:
        return make_hires_edit(name, steps=steps)
    return make_edit(name, steps=steps, partial_images=random.choice([0, 0, 1, 2, 5]))


def test_a_transfer_is_answered_before_the_batches_of_its_plan() -> None:
    """So a checkpoint is complete before the step that is sent with it."""
    site = make_site(1)
    site.scheduler.add(make_edit("a", steps=30))
    run_until(site, lambda: any(plan.transfers for plan in site.workers.queues[0]))
    while not site.workers.queues[0][0].transfers:
        site.answer(0)
    moved, step = site.workers.run_one(0)
    assert isinstance(moved, TransferDone)
    assert isinstance(step, BatchResult)
