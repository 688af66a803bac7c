"""Pages when ranks die: what was on a device is made again where its edits run next; host memory survives."""

from __future__ import annotations

import pytest
from cache_kit import ROOMY, TEMPLATE_BYTES, Engine, make_masked, make_registration
from ranks_that_die import checkpoints_every

from core.config import CacheConfig
from core.failure import Failure
from core.messages.engine import Failed, Finished, TemplatePrimed
from core.messages.worker import StepPlan

DIED = Failure("engine_dead", "worker 0 died")
WITH_DISK = CacheConfig(host_bytes=8 * TEMPLATE_BYTES, disk_bytes=1 << 40)


def kill(engine: Engine, rank: int) -> None:
    engine.workers.lose(rank)
    engine.scheduler.lose_rank(rank, DIED)
    engine.run_until_idle()


def join(engine: Engine, rank: int) -> None:
    engine.workers.join(rank)
    engine.scheduler.join_rank(rank, ())
    engine.run_until_idle()


def steps_of(engine: Engine, request_id: str) -> int:
    return engine.workers.steps_done(request_id)


def test_host_pages_survive_their_rank() -> None:
    engine = Engine()
    engine.scheduler.add(make_masked("first"))
    engine.run()
    primed = len(engine.workers.primed)
    kill(engine, 0)
    join(engine, 0)
    engine.scheduler.add(make_masked("second"))
    engine.run()
    assert engine.finished("second").cache == "hit"
    assert len(engine.workers.primed) == primed


@pytest.mark.parametrize("rejoins", [False, True])
def test_device_pages_are_made_again_where_their_edits_run_next(rejoins: bool) -> None:
    engine = Engine(device_bytes=(TEMPLATE_BYTES, TEMPLATE_BYTES))
    engine.scheduler.add(make_masked("a"))
    engine.run(until=lambda: steps_of(engine, "a") == 3)
    primed = len(engine.workers.primed)
    kill(engine, 0)
    if rejoins:
        join(engine, 0)
    engine.run()
    assert engine.finished("a").cache == "miss"
    assert len(engine.workers.primed) > primed
    assert {rank for rank, _ in engine.workers.pages.devices} == {1}


@pytest.mark.parametrize(("device_bytes", "are_lost"), [(0, False), (TEMPLATE_BYTES, True)])
def test_an_edit_goes_on_from_its_checkpoint_with_pages_as_before(device_bytes: int, are_lost: bool) -> None:
    """Those of the steps that it repeats had been released, or were lost with the device."""
    engine = Engine(device_bytes=(device_bytes,))
    with checkpoints_every(4):
        engine.scheduler.add(make_masked("a", steps=16))
        engine.run(until=lambda: steps_of(engine, "a") == 8)
        engine.scheduler.schedule(0.0)  # lost with the checkpoint after step 8
        primed = len(engine.workers.primed)
        kill(engine, 0)
        join(engine, 0)
        engine.run()
    assert engine.workers.denoised["a"] == [*range(8), *range(4, 16)]
    assert (len(engine.workers.primed) > primed) is are_lost
    assert isinstance(engine.result("a"), Finished)


def test_pages_of_a_device_that_have_gone_down_are_loaded_from_host_memory() -> None:
    engine = Engine(device_bytes=(TEMPLATE_BYTES, 0), cache=ROOMY)
    for name in ("first", "second"):  # what is used twice goes down
        engine.scheduler.add(make_masked(name))
        engine.run()
    primed = len(engine.workers.primed)
    kill(engine, 0)
    join(engine, 0)
    engine.scheduler.add(make_masked("third"))
    engine.run()
    assert (engine.finished("third").cache, engine.finished("third").tier) == ("hit", "host")
    assert len(engine.workers.primed) == primed


def test_edits_follow_the_pages_of_their_template_to_the_device_of_another_rank() -> None:
    """Also when the rank that steps usually run on is back."""
    engine, ranks = Engine(device_bytes=(TEMPLATE_BYTES, TEMPLATE_BYTES)), set[tuple[int, ...]]()
    kill(engine, 0)
    engine.scheduler.add(make_masked("a"))
    engine.run(until=lambda: steps_of(engine, "a") == 3)
    join(engine, 0)
    submit = engine.workers.submit

    def note(plan: StepPlan) -> None:
        ranks.update(batch.ranks for batch in plan.batches if batch.op in {"denoise", "prime"})
        submit(plan)

    engine.workers.submit = note  # type: ignore[method-assign]
    engine.scheduler.add(make_masked("b"))
    engine.run()
    assert engine.finished("b").cache == "hit"
    assert ranks == {(1,)}


def test_a_pass_under_way_begins_again_on_another_rank() -> None:
    """What it had computed was on the rank that died; the template's pixels are read again."""
    engine = Engine(device_bytes=(0, 0), max_num_batched_tokens=64)
    engine.scheduler.add_template(make_registration("t"))
    engine.run(until=lambda: len(engine.workers.primed) == 3)
    kill(engine, 0)
    engine.run()
    assert isinstance(engine.result("t"), TemplatePrimed)
    assert set(engine.workers.passes.values()) == {1}


def test_a_copy_that_its_rank_did_not_finish_is_done_by_another_at_the_next_use() -> None:
    engine = Engine(cache=WITH_DISK, device_bytes=(0, 0))
    engine.scheduler.add(make_masked("first"))
    engine.run()
    engine.scheduler.add(make_masked("second"))
    while not engine.workers.pages.copies:
        engine.step()
    assert {(copy.rank, copy.target) for copy in engine.workers.pages.copies} == {(0, "disk")}
    kill(engine, 0)
    assert not engine.workers.pages.files
    engine.run()
    engine.scheduler.add(make_masked("third"))
    engine.run()
    assert engine.finished("third").cache == "hit"
    assert engine.workers.pages.files
    assert engine.scheduler.cache.stats().failed_stores > 0


def test_without_a_rank_nothing_is_copied_until_one_joins() -> None:
    engine = Engine(cache=WITH_DISK)
    engine.scheduler.add_template(make_registration("t"))
    engine.run()
    kill(engine, 0)
    assert not engine.workers.pages.copies
    join(engine, 0)
    engine.scheduler.add(make_masked("a"))
    engine.run()
    assert engine.finished("a").cache == "hit"
    assert len(engine.workers.pages.files) > 0


def test_priming_that_kills_ranks_fails_those_who_wait_for_it_and_no_others() -> None:
    engine = Engine(max_retries=2)
    for name, content in (("poison", "c0"), ("good", "c1")):
        engine.scheduler.add_template(make_registration(name, content))
    while engine.workers.num_deaths < 3:
        plan = engine.scheduler.schedule(0.0)
        assert plan is not None
        engine.workers.submit(plan)
        if plan.batches[0].items[0].request_id == "prime-0":
            kill(engine, 0)
            join(engine, 0)
        else:
            engine.finish_plan()
    engine.run()
    failed = engine.result("poison")
    assert isinstance(failed, Failed)
    assert "3 workers died" in failed.failure.message
    assert isinstance(engine.result("good"), TemplatePrimed)
