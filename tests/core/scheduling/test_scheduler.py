"""StepScheduler: batches change at every step, limits hold, and every request ends exactly once."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit, with_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.config import SchedulerConfig
from core.costs.load_report import Queued
from core.failure import Failure
from core.graph.work import Work
from core.graph.workflows.inpaint import INPAINT
from core.messages.engine import Aborted, Failed, Finished, PartialImage
from core.messages.worker import BatchResult, StepPlan
from core.patches import Patch
from core.scheduling.ops.decode import Decode
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.scheduler import StepScheduler

TERMINAL = (Finished, Failed, Aborted)
ANY_MS = 1e9


def make_scheduler(num_workers: int = 1, **limits: float | str) -> StepScheduler:
    return StepScheduler(SchedulerConfig(**limits), {"m": MODEL}, num_workers)  # type: ignore[arg-type]


def apply_all(scheduler: StepScheduler, results: list) -> None:  # type: ignore[type-arg]
    for result in results:
        if isinstance(result, BatchResult):
            scheduler.apply(result)
        else:
            scheduler.apply_transfer(result)


def run(scheduler: StepScheduler, workers: FakeWorkers, iterations: int = 10_000) -> list:  # type: ignore[type-arg]
    """Iterate until nothing is left; returns all outputs."""
    outputs = []
    for _ in range(iterations):
        plan = scheduler.schedule(now=0.0)
        if plan is not None:
            workers.submit(plan)
        for rank in range(workers.num_ranks):
            apply_all(scheduler, workers.run_one(rank))
        scheduler.check_integrity()
        outputs += scheduler.take_outputs()
        if not scheduler.num_requests:
            return outputs
    raise AssertionError("requests never ended")


def denoise_batch(plan: StepPlan | None) -> list[str]:
    """Ids of the requests that denoise a step in this plan."""
    batches = plan.batches if plan else ()
    return [item.request_id for batch in batches if batch.op == "denoise" for item in batch.items]


def step(scheduler: StepScheduler, workers: FakeWorkers) -> list[str]:
    """One iteration; returns the ids of the requests that denoised in it."""
    plan = scheduler.schedule(now=0.0)
    if plan is not None:
        workers.submit(plan)
    apply_all(scheduler, workers.run_one(0))
    return denoise_batch(plan)


def test_one_request_goes_through_all_stages() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=3))
    (finished,) = run(scheduler, workers)
    assert isinstance(finished, Finished)
    assert finished.text_tokens == 3
    assert set(finished.ms) == {"queue", "encode", "prime", "denoise", "decode"}
    assert workers.steps_done("a") == 3
    assert scheduler.schedule(now=0.0) is not None, "its tensors are freed even when nothing else is to be done"


def test_a_newcomer_joins_at_the_next_step_and_leaves_after_its_last() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("long", steps=10))
    assert [step(scheduler, workers) for _ in range(3)] == [[], ["long"], ["long"]]
    scheduler.add(make_edit("short", steps=2, arrival=1.0))
    assert step(scheduler, workers) == ["long"], "the newcomer is encoded beside the running step"
    assert step(scheduler, workers) == ["long", "short"]
    assert step(scheduler, workers) == ["long", "short"]
    assert step(scheduler, workers) == ["long"]


def test_requests_with_different_patches_and_without_share_a_step() -> None:
    """Each with its own, which its text encoder gets too."""
    scheduler, workers = make_scheduler(), FakeWorkers()
    sets = {"a": (), "b": (Patch("shirt"),), "c": (Patch("hat", 0.5), Patch("shirt", -1.0))}
    for name, patches in sets.items():
        scheduler.add(with_spec(make_edit(name, steps=2), patches=patches))
    told: dict[str, dict[str, object]] = {TextEncode.__name__: {}, Denoise.__name__: {}}
    while scheduler.num_requests:
        plan = scheduler.schedule(now=0.0)
        assert plan is not None
        for batch in plan.batches:
            for item in batch.items:
                if isinstance(item.work, TextEncode | Denoise):
                    told[type(item.work).__name__][item.request_id] = item.work.patches
            assert batch.op != "denoise" or len(batch.items) == 3
        workers.submit(plan)
        apply_all(scheduler, workers.run_one(0))
        scheduler.take_outputs()
    assert list(told.values()) == [sets, sets]


def test_a_step_is_sent_behind_a_short_one_and_no_further() -> None:
    scheduler, workers = make_scheduler(max_ahead_ms=15.0), FakeWorkers()  # every batch takes 10 ms there
    scheduler.add(make_edit("first"))
    run(scheduler, workers)  # which is learnt from it
    scheduler.add(make_edit("a", steps=4))
    step(scheduler, workers)  # encoding, and nothing is ready behind it
    plans = [scheduler.schedule(now=0.0) for _ in range(3)]
    assert [denoise_batch(plan) for plan in plans] == [["a"], ["a"], []]


def test_nothing_is_sent_behind_a_long_step_or_an_unknown_one() -> None:
    for known in (False, True):
        scheduler, workers = make_scheduler(max_ahead_ms=5.0 if known else 1000.0), FakeWorkers()
        if known:
            scheduler.add(make_edit("first"))
            run(scheduler, workers)
        scheduler.add(make_edit("a", steps=4))
        step(scheduler, workers)
        assert [denoise_batch(scheduler.schedule(now=0.0)) for _ in range(2)] == [["a"], []]


def test_batches_respect_both_limits() -> None:
    scheduler, workers = make_scheduler(max_num_seqs=4, max_num_batched_tokens=600), FakeWorkers()
    for i in range(9):
        scheduler.add(make_edit(f"r{i}", arrival=float(i)))
    while scheduler.num_requests:
        assert len(step(scheduler, workers)) <= 2, "two requests of 280 tokens fit 600"


def test_text_tokens_beyond_the_prompts_count_in_the_budget() -> None:
    """Two rows of 256 image tokens and 24 of the prompt fit 560 tokens; with 77 more each they do not."""
    for extra, together in ((0, ["a", "b"]), (77, ["a"])):
        scheduler, workers = make_scheduler(max_num_batched_tokens=560), FakeWorkers()
        for name in "ab":
            scheduler.add(with_spec(make_edit(name), extra_text_tokens=extra))
        steps = [step(scheduler, workers) for _ in range(4)]
        assert max(steps, key=len) == together
        (request, *_) = scheduler._requests.live()
        sizes = request.sizes(INPAINT.node("denoise"))
        assert sizes.num_all_tokens == sizes.num_step_tokens == 256 + 24 + extra


def test_a_request_above_the_token_budget_runs_alone() -> None:
    scheduler, workers = make_scheduler(max_num_batched_tokens=300), FakeWorkers()
    scheduler.add(make_edit("big", num_tokens=4096))
    scheduler.add(make_edit("small", arrival=1.0))
    assert len(run(scheduler, workers)) == 2


def test_a_request_that_must_run_alone_waits_for_others_to_end_and_then_runs_alone() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("first", steps=4))
    assert [step(scheduler, workers) for _ in range(2)] == [[], ["first"]]
    scheduler.add(msgspec.structs.replace(make_edit("suspect", steps=3, arrival=1.0), num_deaths=2))
    scheduler.add(make_edit("later", arrival=2.0))
    others = set()
    while scheduler.num_requests:
        plan = scheduler.schedule(now=0.0)
        if plan is not None:
            workers.submit(plan)
            names = {item.request_id for batch in plan.batches for item in batch.items}
            assert "suspect" not in names or names == {"suspect"}
            others |= names
            assert "later" not in names or "suspect" in others, "no request overtakes it"
        apply_all(scheduler, workers.run_one(0))
        scheduler.check_integrity()
    assert [output.request_id for output in scheduler.take_outputs()] == ["first", "suspect", "later"]


def test_no_request_begins_beside_one_that_must_run_alone_even_where_another_such_waits() -> None:
    """It was sent again, and came before the one that runs; so was a request that came before both."""
    scheduler, workers = make_scheduler(), FakeWorkers()

    def add(name: str, arrival: float, num_deaths: int) -> None:
        scheduler.add(msgspec.structs.replace(make_edit(name, steps=3, arrival=arrival), num_deaths=num_deaths))

    add("runs", 3.0, 2)
    assert [step(scheduler, workers) for _ in range(2)] == [[], ["runs"]]
    add("first", 1.0, 0)
    add("waits", 2.0, 2)
    while "runs" in scheduler._requests:
        step(scheduler, workers)
        assert scheduler.counts[0] <= 1
    assert [output.request_id for output in run(scheduler, workers)] == ["runs", "first", "waits"]


def test_priority_before_deadline_before_arrival() -> None:
    scheduler, workers = make_scheduler(max_num_seqs=1), FakeWorkers()
    scheduler.add(make_edit("late", arrival=2.0))
    scheduler.add(make_edit("early", arrival=1.0))
    scheduler.add(make_edit("due", arrival=3.0, deadline=10.0))
    scheduler.add(make_edit("urgent", arrival=4.0, priority=-1))
    ended = [output.request_id for output in run(scheduler, workers)]
    assert ended == ["urgent", "due", "early", "late"]


def test_an_owner_with_many_requests_does_not_starve_another() -> None:
    scheduler, workers = make_scheduler(max_num_seqs=2), FakeWorkers()
    for index in range(40):
        scheduler.add(make_edit(f"a{index}", steps=2, owner="a", arrival=float(index)))
    for _ in range(3):
        step(scheduler, workers)
    for index in range(3):
        scheduler.add(make_edit(f"b{index}", steps=2, owner="b", arrival=50.0 + index))
    ended = [output.request_id for output in run(scheduler, workers)]
    first, others = ended.index("b0"), [ended.index("b1"), ended.index("b2")]
    assert first <= 4, f"it waited for those that ran, at most: {ended}"
    assert max(others) <= first + 5, "and its next ones take turns with the other owner's"
    assert [name for name in ended if name.startswith("a")] == [f"a{index}" for index in range(40)]


def test_deadlines_do_not_take_another_owners_share() -> None:
    scheduler, workers = make_scheduler(max_num_seqs=1), FakeWorkers()
    for index in range(20):
        scheduler.add(make_edit(f"a{index}", steps=1, owner="a", arrival=float(index), deadline=1e6 + index))
    scheduler.add(make_edit("b", steps=1, owner="b", arrival=30.0))
    ended = [output.request_id for output in run(scheduler, workers)]
    assert ended.index("b") <= 1


def test_deadlines_of_newcomers_do_not_starve_a_request_without_one() -> None:
    scheduler, workers = make_scheduler(max_num_seqs=1), FakeWorkers()
    scheduler.add(make_edit("patient", arrival=0.0))
    for second in range(70):
        scheduler.add(make_edit(f"hasty-{second}", steps=1, arrival=float(second), deadline=second + 30.0))
    ended = [output.request_id for output in run(scheduler, workers)]
    assert ended.index("patient") < ended.index("hasty-31"), "due 60 s after its arrival, like hasty-30"


def test_an_abort_in_flight_is_answered_when_no_worker_holds_the_request() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=100))
    step(scheduler, workers)
    plan = scheduler.schedule(now=0.0)
    assert plan is not None
    scheduler.abort(["a"])
    assert scheduler.take_outputs() == (), "a worker may still write its pixels"
    workers.submit(plan)
    apply_all(scheduler, workers.run_one(0))
    assert scheduler.take_outputs() == (Aborted(request_id="a"),)
    assert scheduler.num_requests == 0
    assert denoise_batch(scheduler.schedule(now=0.0)) == []


def test_tensors_are_freed_with_the_next_work_or_when_there_is_none() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=1))
    scheduler.add(make_edit("b", steps=50, arrival=1.0))
    while "a" not in workers.freed:
        step(scheduler, workers)
    assert workers.steps_done("b") < 50, "b was still running"
    scheduler.abort(["b"])
    scheduler.add(make_edit("never started", arrival=2.0))
    scheduler.abort(["never started"])
    plan = scheduler.schedule(now=0.0)
    assert plan is not None
    assert [(free.key.request_id, free.ranks) for free in plan.free] == [("b", (0,))]
    assert scheduler.schedule(now=0.0) is None


def test_a_request_that_fails_while_its_preview_is_due_leaves_nothing_behind() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=4, partial_images=3))
    while not scheduler._requests.has_pending_previews:
        step(scheduler, workers)
    workers.fail.add("a")
    while scheduler.num_requests:
        step(scheduler, workers)
    assert not scheduler._requests.has_pending_previews, "nothing would be sent ahead any more"
    scheduler.check_integrity()


def test_aborting_twice_or_after_the_end_gives_no_further_output() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_edit("a"))
    scheduler.abort(["a", "a", "never seen"])
    scheduler.abort(["a"])
    assert scheduler.take_outputs() == (Aborted(request_id="a"),)


def test_a_passed_deadline_fails_the_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_edit("a", deadline=5.0))
    scheduler.schedule(now=5.0)
    (output,) = scheduler.take_outputs()
    assert isinstance(output, Failed)
    assert output.failure.kind == "deadline_exceeded"


def test_a_failed_item_fails_its_request_alone() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers(fail={"bad"})
    for name in ("good", "bad", "fine"):
        scheduler.add(make_edit(name))
    by_id = {output.request_id: output for output in run(scheduler, workers)}
    assert isinstance(by_id["bad"], Failed)
    assert isinstance(by_id["good"], Finished)
    assert isinstance(by_id["fine"], Finished)


def test_partial_images_come_in_order_before_the_end() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=8, partial_images=3))
    outputs = run(scheduler, workers)
    assert [o.index for o in outputs[:-1] if isinstance(o, PartialImage)] == [0, 1, 2]
    assert [o.step for o in outputs[:-1] if isinstance(o, PartialImage)] == [2, 4, 6]
    assert isinstance(outputs[-1], Finished)


def test_the_step_of_a_preview_waits_for_the_preview_before_it() -> None:
    scheduler, workers = make_scheduler(num_workers=2, policy="neustream"), FakeWorkers(num_ranks=2)
    scheduler.add(make_edit("a", steps=8, partial_images=3))
    kept = []
    for turn in range(20):
        plan = scheduler.schedule(now=0.0)
        if plan is not None:
            workers.submit(plan)
            kept += steps_kept(plan)
        apply_all(scheduler, workers.run_one(0))
        if turn < 6:  # it encodes; after that the worker that decodes does nothing all the while
            apply_all(scheduler, workers.run_one(1))
    assert kept == [1], "the first preview has not been decoded"
    assert workers.steps_done("a") == 3, "other steps go on"
    outputs = run(scheduler, workers)
    assert [(o.index, o.step) for o in outputs[:-1] if isinstance(o, PartialImage)] == [(0, 2), (1, 4), (2, 6)]


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 2), st.booleans(), st.randoms())
def test_every_preview_is_sent_whatever_the_order_in_which_workers_answer(
    steps: int, previews: int, num_workers: int, is_ahead: bool, random: Random
) -> None:
    ahead = {"max_ahead_ms": ANY_MS} if is_ahead else {}
    scheduler = make_scheduler(num_workers=num_workers, **ahead)
    workers = FakeWorkers(num_ranks=num_workers)
    for name in "abc":
        scheduler.add(make_edit(name, steps=steps, partial_images=previews))
    told: dict[str, list[int]] = {name: [] for name in "abc"}
    for turn in range(1000):
        if (plan := scheduler.schedule(now=0.0)) is not None:
            workers.submit(plan)
        rank = random.randrange(num_workers) if turn < 200 else turn % num_workers  # none stands still for ever
        apply_all(scheduler, workers.run_one(rank))
        for output in scheduler.take_outputs():
            if isinstance(output, PartialImage):
                told[output.request_id].append(output.index)
            else:
                assert told[output.request_id] == list(range(min(previews, steps - 1))), "and before the end"
        if not scheduler.num_requests:
            return
    raise AssertionError("they do not end")


def test_newcomers_do_not_hold_up_a_preview() -> None:
    scheduler, workers = make_scheduler(max_stage_ms=0.001), FakeWorkers()
    for name in ("text_encode", "image_encode", "decode"):
        key = scheduler.cost_key("m", name)
        for _ in range(50):
            scheduler.cost.observe(key, Work.of([256]), 0.05)
    scheduler.add(make_edit("a", steps=4, partial_images=3))
    told = 0
    for number in range(40):
        scheduler.add(make_edit(f"n{number}", steps=1, arrival=1.0 + number))
        plan = scheduler.schedule(now=0.0)
        if plan is not None:
            workers.submit(plan)
        apply_all(scheduler, workers.run_one(0))
        told += sum(isinstance(output, PartialImage) for output in scheduler.take_outputs())
    assert told == 3


def test_no_preview_is_late_because_steps_are_sent_ahead() -> None:
    scheduler, workers = make_scheduler(max_ahead_ms=ANY_MS), FakeWorkers()
    scheduler.add(make_edit("a", steps=6, partial_images=2))
    kept = []
    while scheduler.num_requests:
        while (plan := scheduler.schedule(now=0.0)) is not None:
            workers.submit(plan)
            kept += steps_kept(plan)
        apply_all(scheduler, workers.run_one(0))
    assert kept == [1, 3]
    assert [output.step for output in scheduler.take_outputs() if isinstance(output, PartialImage)] == [2, 4]


def steps_kept(plan: StepPlan) -> list[int]:
    """Steps of which a preview shows the clean prediction."""
    works = [item.work for batch in plan.batches for item in batch.items]
    return [work.step for work in works if isinstance(work, Denoise) and work.keep_clean]


def test_stage_work_beyond_the_time_budget_waits() -> None:
    scheduler, workers = make_scheduler(max_stage_ms=15.0, max_num_seqs=16), FakeWorkers()
    scheduler.add(make_edit("first"))
    run(scheduler, workers)  # 10 ms per encode are learnt from it
    for i in range(6):
        scheduler.add(make_edit(f"r{i}", arrival=float(i)))
    plan = scheduler.schedule(now=0.0)
    assert plan is not None
    encoded = [item.request_id for batch in plan.batches if batch.op == "image_encode" for item in batch.items]
    assert encoded == ["r0"], "one item always goes, a second would exceed 15 ms"


def test_decoding_on_another_rank_waits_for_the_transfer() -> None:
    scheduler, workers = make_scheduler(num_workers=2), FakeWorkers(num_ranks=2)
    scheduler.add(make_edit("a", steps=2))
    scheduler.add(make_edit("b", steps=30, arrival=1.0))
    outputs = run(scheduler, workers)
    assert [o.request_id for o in outputs] == ["a", "b"]


def test_two_ranks_work_at_once() -> None:
    scheduler, workers = make_scheduler(num_workers=2), FakeWorkers(num_ranks=2)
    scheduler.add(make_edit("a", steps=1))
    scheduler.add(make_edit("b", steps=9, arrival=1.0))
    overlapped = False
    while scheduler.num_requests:
        plan = scheduler.schedule(now=0.0)
        if plan:
            workers.submit(plan)
        apply_all(scheduler, workers.run_one(0))
        decodes = [b for p in workers.queues[1] for b in p.batches if isinstance(b.items[0].work, Decode)]
        overlapped |= bool(decodes) and bool(denoise_batch(plan))
        apply_all(scheduler, workers.run_one(1))
    assert overlapped


def test_dead_workers_end_every_request_once() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    for name in "abc":
        scheduler.add(make_edit(name))
    step(scheduler, workers)
    scheduler.schedule(now=0.0)
    scheduler.abort(["b"])
    scheduler.fail_all(Failure("engine_dead", "gone"))
    outputs = scheduler.take_outputs()
    assert sorted(o.request_id for o in outputs) == ["a", "b", "c"]
    scheduler.check_integrity()


def test_the_load_report_counts_and_predicts() -> None:
    scheduler, workers = make_scheduler(), FakeWorkers()
    scheduler.add(make_edit("a", steps=4))
    run(scheduler, workers)
    scheduler.add(make_edit("b", steps=4))
    report, stats = scheduler.load_report(), scheduler.stats()
    assert (report.num_running, report.num_waiting, report.num_received, stats.steps) == (0, 1, 2, 4)
    assert stats.op_seconds["denoise"] == pytest.approx(0.04, rel=0.05)
    assert report.drain_seconds == pytest.approx(sum(stats.op_seconds.values()))
    queued = report.queue[-1]
    assert isinstance(queued, Queued)
    left = queued.load
    assert left.steps_left == 4
    assert left.steps_left * (left.step_seconds + report.base_seconds) == pytest.approx(0.04, rel=0.05)
    assert [(sample.num_requests, sample.request_ids) for sample in stats.recent_steps] == [(1, ("a",))] * 4
    assert scheduler.stats().recent_steps == (), "each is reported once"


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(-1, 1)), min_size=1, max_size=12),
    seqs=st.integers(1, 5),
    tokens=st.integers(100, 2000),
    ranks=st.integers(1, 2),
    plans=st.integers(1, 3),
)
def test_every_request_ends_exactly_once(
    edits: list[tuple[int, int, int]], seqs: int, tokens: int, ranks: int, plans: int
) -> None:
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    limits |= {"max_plans_in_flight": plans, "max_ahead_ms": ANY_MS}
    scheduler, workers = make_scheduler(num_workers=ranks, **limits), FakeWorkers(num_ranks=ranks)
    for i, (steps, partials, priority) in enumerate(edits):
        scheduler.add(make_edit(f"r{i}", steps=steps, partial_images=partials, priority=priority, arrival=float(i)))
    outputs = run(scheduler, workers)
    ends = Counter(o.request_id for o in outputs if isinstance(o, TERMINAL))
    assert ends == Counter(f"r{i}" for i in range(len(edits)))
    assert all(workers.steps_done(f"r{i}") == steps for i, (steps, _, _) in enumerate(edits))


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, aborts, failures, plans and results in any order: all counts always agree."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(num_workers=2, max_num_seqs=3, max_plans_in_flight=2, max_ahead_ms=ANY_MS)
        self.workers = FakeWorkers(num_ranks=2)
        self.added: list[str] = []
        self.ended: Counter[str] = Counter()

    @rule(
        steps=st.integers(1, 6),
        partials=st.integers(0, 2),
        deadline=st.none() | st.floats(1, 50),
        owner=st.sampled_from(["", "a", "b"]),
    )
    def add(self, steps: int, partials: int, deadline: float | None, owner: str) -> None:
        name = f"r{len(self.added)}"
        self.added.append(name)
        self.scheduler.add(make_edit(name, steps=steps, partial_images=partials, deadline=deadline, owner=owner))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.added:
            self.scheduler.abort([data.draw(st.sampled_from(self.added))])

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        if self.added:
            self.workers.fail.add(data.draw(st.sampled_from(self.added)))

    @rule(now=st.floats(0, 60))
    def schedule(self, now: float) -> None:
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.workers.submit(plan)

    @rule(rank=st.integers(0, 1))
    def work(self, rank: int) -> None:
        apply_all(self.scheduler, self.workers.run_one(rank))

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()
        for output in self.scheduler.take_outputs():
            assert output.request_id not in self.ended, "nothing is said after the terminal output"
            if isinstance(output, TERMINAL):
                self.ended[output.request_id] += 1

    def teardown(self) -> None:
        for output in run(self.scheduler, self.workers) if self.scheduler.num_requests else []:
            self.ended[output.request_id] += isinstance(output, TERMINAL)
        assert self.ended == Counter(self.added)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
