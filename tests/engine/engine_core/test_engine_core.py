"""EngineCore: its loop answers every request, drains, and reports when its workers are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit
from loopback import Loopback
from run_workflows import CLASSES, DIAMOND

from core import restarts
from core.config import SchedulerConfig
from core.costs.load_report import LoadReport
from core.errors import EngineDeadError
from core.failure import NEVER_BEGUN, Failure
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import (
    Abort,
    Aborted,
    AdapterAdded,
    Drain,
    DropTemplate,
    EngineFailed,
    EngineOutputs,
    Failed,
    Finished,
    FromEngine,
    ToEngine,
    WorkflowAdded,
)
from core.messages.worker import (
    AdapterLoaded,
    Addition,
    DropAdapter,
    DropWorkflow,
    LoadAdapter,
    LoadWorkflow,
    ModelFailed,
    ModelLoaded,
    Removal,
    WorkerFailed,
    WorkerReady,
)
from core.scheduling.dispatch import AskAgain, Decision
from core.scheduling.policies.planner.default import Default
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View
from engine.engine_core import engine_core
from engine.engine_core.engine_core import EngineCore, RefusedRequest

LOADED = tuple(LoadedComponent(ModelKey("0", kind), 1) for kind in ("text_encoder", "transformer", "vae"))


@pytest.fixture
def said() -> list[FromEngine]:
    return []


@pytest.fixture
def core(said: list[FromEngine]) -> EngineCore:
    executor = Loopback()
    executor.core = EngineCore(StepScheduler(SchedulerConfig(), {"m": MODEL}), executor, said.append)
    return executor.core


def outputs(said: list[FromEngine]) -> list[object]:
    return [out for message in said if isinstance(message, EngineOutputs | EngineFailed) for out in message.outputs]


async def test_an_adapter_is_loaded_beside_requests(core: EngineCore, said: list[FromEngine]) -> None:
    core.mailbox.put_nowait(make_edit("r", steps=3))
    core.mailbox.put_nowait(LoadAdapter("load", "m", "hat", "hat.safetensors"))
    core.mailbox.put_nowait(DropAdapter("m", "x"))
    running = asyncio.create_task(core.run())
    async with asyncio.timeout(5):
        while len(outputs(said)) < 2:
            await asyncio.sleep(0)
    core.mailbox.put_nowait(Drain())
    await running
    assert AdapterAdded("load", "of hat.safetensors") in outputs(said)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_workflow_is_answered_when_its_classes_are_loaded_or_cannot_be(
    said: list[FromEngine], *, fails: bool
) -> None:
    executor = Loopback()
    core = executor.core = EngineCore(StepScheduler(SchedulerConfig(), {"m": MODEL}), executor, said.append)
    running = asyncio.create_task(core.run())
    core.mailbox.put_nowait(LoadWorkflow("load", replace(DIAMOND, name="diamond@1"), CLASSES[:1]))
    async with asyncio.timeout(5):
        while not any(key.component == "class" for _, key in executor.workers.loading):
            for loaded in executor.workers.finish_loads():
                executor.say(loaded)
            await asyncio.sleep(0)
        assert not outputs(said)
        ((rank, key),) = executor.workers.loading
        why = Failure("config", "it will not")
        executor.say(ModelFailed(rank, key, why) if fails else ModelLoaded(rank, LoadedComponent(key, 8), 0.01))
        while not outputs(said):
            await asyncio.sleep(0)
    (answer,) = outputs(said)
    if fails:
        assert isinstance(answer, Failed)
        assert "it will not" in answer.failure.message
    else:
        assert answer == WorkflowAdded("load", "diamond@1")
    core.mailbox.put_nowait(DropWorkflow("diamond@1"))
    core.mailbox.put_nowait(Drain())
    await running
    assert executor.told[-1] == (0, DropWorkflow("diamond@1"))


class Late(Default):
    """Asks again when it sees a request first, instead of giving work."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[float] = []

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        if not list(view.requests.live()):
            return ()
        self.passes.append(now)
        return (AskAgain(0.05),) if len(self.passes) == 1 else super().choose(view, now)


async def test_a_pass_that_the_policy_asks_for_comes_although_nothing_else_does(
    said: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "REPORT_SECONDS", 1e3)  # after a report there is a pass, too
    executor, policy = Loopback(), Late()
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL}, policy=policy)
    executor.core = core = EngineCore(scheduler, executor, said.append)
    core.mailbox.put_nowait(make_edit("r", steps=1))
    core.mailbox.put_nowait(Drain())
    async with asyncio.timeout(10):
        await core.run()
    assert [type(output) for output in outputs(said)] == [Finished]
    assert policy.passes[1] - policy.passes[0] >= 0.05


async def test_it_serves_then_drains(core: EngineCore, said: list[FromEngine]) -> None:
    for i in range(5):
        core.mailbox.put_nowait(make_edit(f"r{i}", steps=i + 1))
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(core.run(), 5)
    ended = outputs(said)
    assert all(isinstance(output, Finished) for output in ended)
    assert len(ended) == 5
    last = said[-1]
    assert isinstance(last, EngineOutputs)
    assert last.stats is not None
    assert (last.load.num_running, last.load.num_waiting, last.stats.steps) == (0, 0, 5)


async def test_a_request_that_cannot_be_read_is_answered_and_counted(core: EngineCore, said: list[FromEngine]) -> None:
    """Counted, because the router matches the number of requests it sent with the number received."""
    core.mailbox.put_nowait(RefusedRequest("bad", Failure("engine", "a test")))
    core.mailbox.put_nowait(make_edit("good"))
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(core.run(), 5)
    refused, ended = outputs(said)
    assert refused == Failed(request_id="bad", failure=Failure("engine", "a test"))
    assert isinstance(ended, Finished)
    assert isinstance(said[-1], EngineOutputs)
    assert said[-1].load.num_received == 2


async def test_an_abort_ends_a_running_request_within_two_steps(said: list[FromEngine]) -> None:
    loopback = Loopback()
    workers = loopback.workers
    core = loopback.core = EngineCore(StepScheduler(SchedulerConfig(), {"m": MODEL}), loopback, said.append)
    core.mailbox.put_nowait(make_edit("a", steps=200))
    running = asyncio.create_task(core.run())
    while not any(isinstance(m, EngineOutputs) and m.load.num_running for m in said):
        await asyncio.sleep(0)
    core.mailbox.put_nowait(Abort(request_ids=("a",)))
    steps = workers.steps_done("a")
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)
    assert outputs(said) == [Aborted(request_id="a")]
    assert workers.steps_done("a") - steps <= 2, "it takes effect within two steps"


class CountingScheduler(StepScheduler):
    """Counts how often its integrity is checked."""

    num_checks = 0

    def check_integrity(self) -> None:
        self.num_checks += 1
        super().check_integrity()


async def test_integrity_is_checked_when_the_engine_becomes_idle_and_not_while_it_stays_idle(
    said: list[FromEngine],
) -> None:
    scheduler, loopback = CountingScheduler(SchedulerConfig(), {"m": MODEL}), Loopback()
    core = loopback.core = EngineCore(scheduler, loopback, said.append)
    running = asyncio.create_task(core.run())

    async def say(message: ToEngine) -> None:
        core.mailbox.put_nowait(message)
        async with asyncio.timeout(5):
            while not core.mailbox.empty() or scheduler.num_requests:
                await asyncio.sleep(0)
            for _ in range(3):  # the last message is taken and worked on
                await asyncio.sleep(0)

    for number in (1, 2):
        await say(make_edit(f"r{number}"))
        for _ in range(3):
            await say(DropTemplate(model="m", content_id="c"))
        assert scheduler.num_checks == number
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)
    assert scheduler.num_checks == 2


async def test_changes_are_reported_at_once_and_everything_else_within_a_second(
    said: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "REPORT_SECONDS", 0.05)
    scheduler, loopback = StepScheduler(SchedulerConfig(), {"m": MODEL}), Loopback()
    core = loopback.core = EngineCore(scheduler, loopback, said.append)
    running = asyncio.create_task(core.run())
    core.mailbox.put_nowait(make_edit("a", steps=50))
    async with asyncio.timeout(5):
        while not outputs(said):
            await asyncio.sleep(0)
    first, *others = [message for message in said if isinstance(message, EngineOutputs)]
    assert (first.load.num_received, first.load.num_running) == (0, 0), "what it knows when it begins"
    assert len(others) < 6, "of some 50 iterations, those in which it began, or ended"
    assert others[-1].stats is not None, "what ends is counted at once"
    told = len(said)
    core.mailbox.put_nowait(DropTemplate(model="m", content_id="c"))  # changes nothing that is reported at once
    await asyncio.sleep(0.01)
    assert len(said) == told
    async with asyncio.timeout(5):
        while len(said) == told:
            await asyncio.sleep(0.01)
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def last_load(said: list[FromEngine]) -> LoadReport:
    return next(message.load for message in reversed(said) if isinstance(message, EngineOutputs))


async def serve(core: EngineCore, said: list[FromEngine], num_edits: int = 2) -> asyncio.Task[None]:
    """Run until this many edits have begun."""
    for index in range(num_edits):
        core.mailbox.put_nowait(make_edit("abc"[index], steps=200))
    running = asyncio.create_task(core.run())
    await until(lambda: bool(said) and last_load(said).num_running == num_edits)
    return running


@pytest.fixture
def sturdy(said: list[FromEngine]) -> Loopback:
    """Requests that survive any number of deaths."""
    loopback, config = Loopback(), SchedulerConfig(max_retries=100)
    loopback.core = EngineCore(StepScheduler(config, {"m": MODEL}), loopback, said.append)
    return loopback


async def test_a_dead_worker_is_restarted_while_its_requests_wait(sturdy: Loopback, said: list[FromEngine]) -> None:
    core = sturdy.core
    assert core is not None
    running = await serve(core, said)
    sturdy.die()
    await until(lambda: sturdy.restarted == [(0, 0.0)])
    core.mailbox.put_nowait(make_edit("c"))
    await until(lambda: (last_load(said).num_ranks, last_load(said).num_received) == (0, 3))
    assert (last_load(said).num_running, last_load(said).num_waiting) == (2, 1)
    assert outputs(said) == []
    sturdy.join()
    core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)
    assert [type(output) for output in outputs(said)] == [Finished] * 3
    last = said[-1]
    assert isinstance(last, EngineOutputs)
    assert last.load.num_ranks == 1
    assert last.stats is not None
    assert (last.stats.ranks[0].deaths, last.stats.ranks[0].is_up) == (1, True)


async def test_a_worker_that_was_restarted_loads_the_adapters_that_came_later(
    sturdy: Loopback, said: list[FromEngine]
) -> None:
    assert sturdy.core is not None
    running = await serve(sturdy.core, said, num_edits=0)
    sturdy.core.mailbox.put_nowait(LoadAdapter("load", "m", "hat", "hat"))
    await until(lambda: len(outputs(said)) == 1)
    sturdy.die()
    await until(lambda: len(sturdy.restarted) == 1)
    sturdy.told.clear()
    sturdy.core.mailbox.put_nowait(LoadAdapter("late", "m", "cap", "cap"))
    await asyncio.sleep(0.05)
    assert not sturdy.told, "no worker is up"
    sturdy.join()
    await until(lambda: len(outputs(said)) == 2)
    assert outputs(said)[-1] == AdapterAdded("late", "of cap")
    sturdy.core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)
    assert sturdy.told == [
        (0, LoadAdapter("load", "m", "hat", "hat", "of hat")),
        (0, LoadAdapter("late", "m", "cap", "cap")),
    ]


async def test_a_worker_that_keeps_dying_ends_the_engine(sturdy: Loopback, said: list[FromEngine]) -> None:
    """Also while it starts. It waits longer each time; in the end every request is answered."""
    assert sturdy.core is not None
    running = await serve(sturdy.core, said)
    sturdy.die()
    await until(lambda: len(sturdy.restarted) == 1)
    sturdy.say(WorkerFailed(rank=0, failure=Failure("config", "no such file")))
    await until(lambda: len(sturdy.restarted) == 2)
    for number in (3, 4):
        sturdy.join()
        sturdy.die()
        await until(lambda number=number: len(sturdy.restarted) == number)
    assert [seconds for _, seconds in sturdy.restarted] == [0.0, 1.0, 2.0, 4.0]
    assert sturdy.core._scheduler.stats().ranks[0].deaths == 4, "failed restarts count"
    sturdy.say(WorkerFailed(rank=0, failure=Failure("engine_dead", "worker 0 died")))
    with pytest.raises(EngineDeadError, match="worker 0 died"):
        await asyncio.wait_for(running, 5)
    assert {output.request_id for output in outputs(said) if isinstance(output, Failed)} == {"a", "b"}
    assert isinstance(said[-1], EngineFailed)
    load = last_load(said)
    assert load.num_running + load.num_waiting == 2, "it does not say that it is idle, to be sent more"


async def test_an_engine_goes_on_without_a_worker_that_keeps_dying_until_all_do(said: list[FromEngine]) -> None:
    """It is restarted after longer and longer waits."""
    loopback, config = Loopback(), SchedulerConfig(max_retries=100)
    loopback.workers = FakeWorkers(2)
    core = loopback.core = EngineCore(StepScheduler(config, {"m": MODEL}, 2), loopback, said.append)
    running = await serve(core, said, num_edits=0)
    for number in range(1, 12):
        loopback.die(1)
        await until(lambda number=number: len(loopback.restarted) == number)
        await until(lambda: last_load(said).num_ranks == 1)
        if number < 11:
            loopback.join(1)
            await until(lambda: last_load(said).num_ranks == 2)
    assert [seconds for _, seconds in loopback.restarted] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 5]
    core.mailbox.put_nowait(make_edit("a"))
    await until(lambda: bool(outputs(said)))
    assert isinstance(outputs(said)[0], Finished)
    for number in range(1, 5):
        loopback.die(0)
        await until(lambda number=number: len(loopback.restarted) == 11 + number)
        loopback.join(0)
    loopback.die(0)
    with pytest.raises(EngineDeadError, match="worker 0 died"):
        await asyncio.wait_for(running, 5)


@pytest.mark.parametrize(("seconds", "is_refused"), [(0.0, True), (engine_core.PROVEN_SECONDS, False)])
async def test_a_death_is_a_models_if_its_worker_had_worked_only_briefly(
    said: list[FromEngine], caplog: pytest.LogCaptureFixture, seconds: float, is_refused: bool
) -> None:
    """What has computed for a while before is not blamed on what it computes now."""
    model, loopback = msgspec.structs.replace(MODEL, components=tuple(each.key for each in LOADED)), Loopback()
    scheduler = StepScheduler(SchedulerConfig(), {"m": model})
    scheduler.learn((), [(0, LOADED)])
    core = loopback.core = EngineCore(scheduler, loopback, said.append)
    loopback.is_hung = True
    running = asyncio.create_task(core.run())
    for number, owner in enumerate("AB", start=1):
        core.mailbox.put_nowait(make_edit(owner, owner=owner))
        await until(lambda: any(plan.batches for plan in loopback.workers.queues[0]))
        core._restarts[0].note_work(time.monotonic() + seconds)
        loopback.die()
        await until(lambda number=number: len(loopback.restarted) == number)
        core.mailbox.put_nowait(Abort((owner,)))
        loopback.say(WorkerReady(rank=0, models=(model,), components=LOADED))
        loopback.workers.join(0)
        await until(lambda: scheduler.ranks.up == (0,))
    assert scheduler.stats().models == {"m": "quarantined" if is_refused else "loaded"}
    assert ("the model m is not run for a while" in caplog.text) is is_refused
    running.cancel()


async def test_a_worker_that_has_served_a_while_may_die_any_number_of_times(
    sturdy: Loopback, said: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "PROVEN_SECONDS", 0.0)
    assert sturdy.core is not None
    running = await serve(sturdy.core, said, num_edits=0)
    for number in range(1, 11):
        sturdy.die()
        await until(lambda number=number: len(sturdy.restarted) == number)
        sturdy.join()
    sturdy.core.mailbox.put_nowait(Drain())
    await asyncio.wait_for(running, 5)
    assert sturdy.restarted == [(0, 0.0)] * 10


async def test_a_worker_that_serves_something_else_after_its_restart_ends_the_engine(
    sturdy: Loopback, said: list[FromEngine]
) -> None:
    assert sturdy.core is not None
    running = await serve(sturdy.core, said)
    sturdy.die()
    sturdy.say(WorkerReady(rank=0, models=()))
    with pytest.raises(EngineDeadError, match="no longer serves its models"):
        await asyncio.wait_for(running, 5)


async def test_only_the_worker_that_does_not_answer_is_killed(said: list[FromEngine]) -> None:
    loopback = Loopback()
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    core = loopback.core = EngineCore(scheduler, loopback, said.append, hang_seconds=0.2)
    running = asyncio.create_task(core.run())
    core.mailbox.put_nowait(make_edit("a", steps=20))
    async with asyncio.timeout(5):
        while not outputs(said):
            await asyncio.sleep(0)
    await asyncio.sleep(0.5)
    assert not loopback.killed, "idle is not hung"
    loopback.is_hung = True
    core.mailbox.put_nowait(make_edit("b"))
    await asyncio.sleep(0.1)
    assert not loopback.killed
    async with asyncio.timeout(5):
        while not loopback.killed:
            await asyncio.sleep(0.01)
    assert loopback.killed == [0]
    running.cancel()


class SlowLoader(Loopback):
    """Its worker, while it hangs, loads what it is told to when `finish` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[LoadAdapter] = []

    def tell(self, rank: int, message: Addition | Removal) -> None:
        if self.is_hung and isinstance(message, LoadAdapter):
            self.waiting.append(message)
        else:
            super().tell(rank, message)

    def finish(self) -> None:
        message = self.waiting.pop(0)
        self.say(AdapterLoaded(0, message.request_id, message.patch))


async def test_a_worker_that_loads_adapters_again_has_time_for_each(
    said: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches wait until it has all of them. Then it has to answer, too."""
    monkeypatch.setattr(engine_core, "LOAD_SECONDS", 0.8)
    executor = SlowLoader()
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    core = executor.core = EngineCore(scheduler, executor, said.append, hang_seconds=0.1)
    running = asyncio.create_task(core.run())
    for name in ("hat", "cap"):
        core.mailbox.put_nowait(LoadAdapter(name, "m", name, name))
    core.mailbox.put_nowait(make_edit("measured", steps=20))
    await until(lambda: len(outputs(said)) == 3)
    executor.die()
    await until(lambda: bool(executor.restarted))
    executor.is_hung = True
    core.mailbox.put_nowait(make_edit("r"))
    executor.join()
    await until(lambda: len(executor.waiting) == 2)
    for _ in range(2):
        await asyncio.sleep(0.5)
        assert not executor.killed
        executor.finish()
    async with asyncio.timeout(5):
        while not executor.killed:
            await asyncio.sleep(0.01)
    running.cancel()


async def test_a_worker_that_hangs_is_killed_although_it_loads_one_adapter_after_another(
    said: list[FromEngine],
) -> None:
    loopback = Loopback()
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    core = loopback.core = EngineCore(scheduler, loopback, said.append, hang_seconds=0.2)
    running = asyncio.create_task(core.run())
    core.mailbox.put_nowait(make_edit("measured", steps=20))
    await until(lambda: bool(outputs(said)))
    loopback.is_hung = True
    core.mailbox.put_nowait(make_edit("r"))
    async with asyncio.timeout(5):
        while not loopback.killed:
            core.mailbox.put_nowait(LoadAdapter(f"load-{len(said)}", "m", "hat", "hat"))
            await asyncio.sleep(0.05)
    running.cancel()


async def test_requests_that_no_worker_had_begun_are_marked_so(
    said: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback = Loopback()
    core = loopback.core = EngineCore(
        StepScheduler(SchedulerConfig(max_num_seqs=1), {"m": MODEL}), loopback, said.append
    )
    for name in "ab":
        core.mailbox.put_nowait(make_edit(name, steps=200))
    running = asyncio.create_task(core.run())
    await asyncio.sleep(0.01)
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 0)
    loopback.say(WorkerFailed(rank=0, failure=Failure("engine", "RuntimeError: broken", detail="a traceback")))
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(running, 5)
    failures = {output.request_id: output.failure for output in outputs(said) if isinstance(output, Failed)}
    assert {failure.kind for failure in failures.values()} == {"engine_dead"}
    assert {name: failure.code for name, failure in failures.items()} == {"a": None, "b": NEVER_BEGUN}
    assert loopback.killed == [0], "nothing may touch the requests' memory any more"
