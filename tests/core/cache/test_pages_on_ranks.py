"""Pages on several ranks: which rank primes, loads and reads them, in host memory and on its own device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_kit import AHEAD, ROOMY, TEMPLATE_BYTES, Engine, make_masked, make_registration
from cache_ranks import ChosenRanks

from core.cache.activation_cache_manager import ActivationCacheManager, TierBudget
from core.cache.entry import EntryState, WantedEntry
from core.config import CacheConfig
from core.messages.engine import TemplatePrimed
from core.messages.worker import PageCopied, StepPlan


def make_engine(
    device_bytes: Sequence[int], nodes: int, jobs: int, pages: int, cache: CacheConfig = ROOMY
) -> tuple[Engine, list[StepPlan]]:
    """An engine of two ranks, and the list to which `run` adds its plans."""
    engine = Engine(cache=cache, device_bytes=device_bytes)
    engine.scheduler._policy = ChosenRanks(nodes, jobs, pages)
    plans: list[StepPlan] = []
    submit = engine.workers.submit
    engine.workers.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign]
    return engine, plans


def ranks_of(plans: Sequence[StepPlan], op: str) -> set[tuple[int, ...]]:
    return {batch.ranks for plan in plans for batch in plan.batches if batch.op == op}


@pytest.mark.parametrize(("nodes", "jobs"), [(0, 1), (1, 0), (1, 1)])
def test_host_pages_are_primed_by_one_rank_and_read_by_another(nodes: int, jobs: int) -> None:
    engine, plans = make_engine((0, 0), nodes, jobs, pages=0)
    engine.scheduler.add(make_masked("a"))
    engine.run()
    assert engine.finished("a").cache == "miss"
    assert ranks_of(plans, "denoise") == ranks_of(plans, "decode") == {(nodes,)}
    assert ranks_of(plans, "prime") == ranks_of(plans, "template_encode") == {(jobs,)}


def test_device_pages_are_primed_and_read_on_the_rank_that_the_policy_names() -> None:
    engine, plans = make_engine((0, 8 * TEMPLATE_BYTES), nodes=1, jobs=0, pages=1)
    for name in "ab":
        engine.scheduler.add(make_masked(name))
        engine.run()
    assert ranks_of(plans, "prime") == {(1,)}
    assert ranks_of(plans, "template_encode") == {(0,)}, "clean latents are in host memory, where any rank writes them"
    assert engine.workers.pages.device_reads == {1}
    assert (engine.finished("b").cache, engine.finished("b").tier) == ("hit", "device")


def test_steps_do_not_run_where_their_pages_are_not() -> None:
    engine, plans = make_engine((8 * TEMPLATE_BYTES, 8 * TEMPLATE_BYTES), nodes=1, jobs=0, pages=0)
    engine.scheduler.add_template(make_registration("t"))
    engine.run()
    assert isinstance(engine.result("t"), TemplatePrimed)
    engine.scheduler.add(make_masked("a"))
    for _ in range(30):
        engine.step()
        engine.finish_copies()
    assert ranks_of(plans, "denoise") == set(), "the policy asks for rank 1"
    engine.scheduler._policy = ChosenRanks(nodes=0, jobs=1, pages=1)
    engine.run()
    assert ranks_of(plans, "denoise") == ranks_of(plans, "prime") == {(0,)}, "they stay, whatever the policy prefers"


def test_edits_are_decoded_over_latents_in_host_memory_when_their_pages_are_on_a_device() -> None:
    engine = Engine(device_bytes=(8 * TEMPLATE_BYTES, 0), cache=CacheConfig(host_bytes=2 * TEMPLATE_BYTES))
    for name in "ab":
        engine.scheduler.add(make_masked(name))
        engine.run()
        assert engine.finished(name)
    stats = engine.scheduler.cache.stats()
    assert engine.workers.pages.device_reads == {0}
    assert stats.used_bytes["device"] > 0
    assert stats.hits == {"device": 5, "host": 1}


def test_pages_used_twice_go_down_from_a_ranks_device_and_come_up_again() -> None:
    cache = CacheConfig(host_bytes=8 * TEMPLATE_BYTES)
    engine, plans = make_engine((0, TEMPLATE_BYTES), nodes=1, jobs=0, pages=1, cache=cache)
    for name, content in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")]:
        engine.scheduler.add(make_masked(name, content=content))
        engine.run()
    copies = [copy for plan in plans for copy in plan.copies]
    assert {(copy.source, copy.target) for copy in copies} == {("device", "host"), ("host", "device")}
    assert {copy.rank for copy in copies} == {1}
    assert {gone.rank for plan in plans for gone in plan.forget} == {1}
    assert (engine.finished("a3").cache, engine.finished("a3").tier) == ("hit", "host")


def test_copies_to_a_device_begin_with_the_plan_that_encodes_and_primed_pages_need_none() -> None:
    """So that they are under way while prompt and picture are encoded."""
    cache = CacheConfig(host_bytes=8 * TEMPLATE_BYTES)
    engine, plans = make_engine((0, TEMPLATE_BYTES), nodes=1, jobs=0, pages=1, cache=cache)
    engine.scheduler.add(make_masked("a1", content="a"))
    engine.run()
    assert [copy for plan in plans for copy in plan.copies] == [], "its steps read what was primed where it is"
    for name, content in [("a2", "a"), ("b1", "b")]:
        engine.scheduler.add(make_masked(name, content=content))
        engine.run()
    plans.clear()
    engine.scheduler.add(make_masked("a3", content="a"))
    engine.run()
    first = plans[0]
    assert {batch.op for batch in first.batches} == {"text_encode", "image_encode"}
    ups = [copy.key for plan in plans for copy in plan.copies if copy.target == "device"]
    assert [copy.key for copy in first.copies if copy.target == "device"] == ups
    assert len(ups) == 5, "all keyframes; ranks share clean latents, in host memory"


def test_a_rank_reads_what_another_has_primed_after_its_own_load_has_failed() -> None:
    """It remembers failed loads, for steps that wait for them, until it is told to forget them."""
    cache = CacheConfig(host_bytes=TEMPLATE_BYTES, disk_bytes=1 << 40)
    engine, plans = make_engine((0, 0), nodes=0, jobs=1, pages=0, cache=cache)
    for name, content in [("a1", "a"), ("a2", "a"), ("b", "b")]:
        engine.scheduler.add(make_masked(name, content=content))
        engine.run()
    engine.workers.pages.files.clear()
    engine.scheduler.add(make_masked("a3", content="a"))
    engine.run()
    assert engine.scheduler.cache.stats().failed_loads > 0
    assert engine.finished("a3").cache == "miss"
    assert ranks_of(plans, "prime") == {(1,)}


def test_steps_that_wait_for_blocks_run_on_the_rank_that_loads_them() -> None:
    manager = ActivationCacheManager(
        [TierBudget("host", 9000)], has_disk=True, page_arena_id=0, keep_all=True, num_ranks=2
    )
    assert manager.reserve([WantedEntry("t-1", 640, 64)], lambda tier, nbytes: True, rank=1)
    assert manager.state("t-1") is EntryState.LOADING
    assert [manager.is_readable("t-1", (rank,), may_load=True) for rank in (0, 1)] == [False, True]
    assert not manager.is_readable("t-1", (0, 1), may_load=True)
    assert not manager.is_readable("t-1", (1,))
    manager.finish_copy(PageCopied(1, "t-1", 640, "disk", "host", True, 0.1))
    assert manager.is_readable("t-1", (0, 1)), "what is complete, all ranks can read"


def test_an_entry_that_is_still_copied_down_cannot_be_waited_for() -> None:
    """Its load begins when that copy is over; the worker does not know of it yet."""
    manager = ActivationCacheManager(
        [TierBudget("device", 700), TierBudget("host", 9000)], has_disk=True, page_arena_id=0, keep_all=True
    )
    one, other = WantedEntry("t-1", 640, 64), WantedEntry("u-1", 640, 64)
    for _ in range(2):  # used twice, it goes down
        assert manager.reserve([one], lambda tier, nbytes: False)
        if manager.state("t-1") is EntryState.EMPTY:
            manager.fill("t-1")
        manager.release(["t-1"])
    manager.finish_copy(PageCopied(0, "t-1", 640, "device", "host", True, 0.1))
    manager.finish_copy(PageCopied(0, "t-1", 640, "host", "disk", False, 0.1))  # the disk is full
    assert manager.reserve([other], lambda tier, nbytes: False)
    manager.release(["u-1"])
    manager.register(["t-1"])  # tries the disk again
    assert manager.reserve([one], lambda tier, nbytes: True)
    assert manager.state("t-1") is EntryState.LOADING
    assert not manager.is_readable("t-1", (0,), may_load=True)
    manager.finish_copy(PageCopied(0, "t-1", 640, "host", "disk", True, 0.1))
    assert manager.is_readable("t-1", (0,), may_load=True), "now it is loaded"


def test_a_template_that_fits_no_host_memory_for_latents_places_nothing() -> None:
    manager = ActivationCacheManager(
        [TierBudget("device", 9000), TierBudget("host", 100)],
        has_disk=False,
        page_arena_id=0,
        keep_all=True,
        num_ranks=2,
    )
    wants = [WantedEntry("t-latents", 640, 640, is_shared=True), WantedEntry("t-1", 640, 64)]
    assert not manager.reserve(wants, lambda tier, nbytes: False)
    assert [manager.state(want.key) for want in wants] == [EntryState.ABSENT] * 2
    assert manager.stats().used_bytes == {"device": 0, "host": 0}


def test_a_second_plan_may_be_behind_a_step_over_device_pages() -> None:
    engine = Engine(device_bytes=(8 * TEMPLATE_BYTES, 0), **AHEAD)
    for name in "abc":
        engine.scheduler.add(make_masked(name, content=name, full_steps=1))
    plans = 0
    while engine.scheduler.num_requests:
        plan = engine.scheduler.schedule(now=0.0)
        plans += plan is not None
        if plan is not None:
            engine.workers.submit(plan)
        if plan is None or len(engine.workers.queues[0]) > 1:
            for rank in (0, 1):
                engine.finish_plan(rank)
            engine.finish_copies()
        assert plans < 1000
    assert all(engine.finished(name) for name in "abc")
