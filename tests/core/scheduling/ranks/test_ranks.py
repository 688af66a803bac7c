"""What is known of each rank comes from its worker alone."""

from __future__ import annotations

from fakes import MODEL, FakeWorkers, make_edit

from core.config import SchedulerConfig
from core.handles import LoadedComponent, ModelKey
from core.messages.worker import BatchResult
from core.scheduling.scheduler import StepScheduler


def test_models_are_resident_where_workers_say_so_and_seconds_count_for_their_rank() -> None:
    scheduler, workers = StepScheduler(SchedulerConfig(), {"m": MODEL}, 2), FakeWorkers(2)
    assert scheduler.stats().resident_models == ()
    vae, transformer = (LoadedComponent(ModelKey("0f", kind), 1000) for kind in ("vae", "transformer"))
    scheduler.learn((), {0: [transformer, vae], 1: [vae]}.items())
    scheduler.add(make_edit("a", steps=3))
    while scheduler.num_requests:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            workers.submit(plan)
        for rank in range(2):
            for result in workers.run_one(rank):
                apply = scheduler.apply if isinstance(result, BatchResult) else scheduler.apply_transfer
                apply(result)  # type: ignore[arg-type]
    stats = scheduler.stats()
    assert stats.resident_models == (transformer, vae)
    assert [rank.resident_models for rank in stats.ranks] == [(transformer, vae), (vae,)]
    first, last = (rank.busy_seconds for rank in stats.ranks)
    assert 0 == last < first, "a lone request stays on one rank"
    assert abs(first + last - sum(stats.busy_seconds.values())) < 1e-9
