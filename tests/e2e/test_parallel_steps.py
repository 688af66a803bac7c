"""Two ranks compute each step together, and a third decodes beside them: pictures as with one rank, also when a member
of the group dies, hangs or fails in the middle of a step.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from fault_kit import (
    EDITS,
    POISON,
    Told,
    assert_alike,
    begin,
    count,
    ends,
    make_input,
    processes,
    run,
    run_each,
    shim,
    start,
    until,
)

from core.costs.load_report import StepSample
from core.errors import EngineError
from engine.client.async_engine import AsyncEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = f"""
def inject(module, folder):
    from model_executor.parallel.group import Group

    exchange, denoise = Group.exchange, module.HANDLERS["denoise"]

    def exchange_or_fail(self, parts, shapes):
        if self.me == 1 and os.path.exists(folder + "/fail"):
            os.remove(folder + "/fail")
            raise RuntimeError("injected")
        return exchange(self, parts, shapes)

    def denoise_or_fail(context, items):
        if any(item.request_id.startswith({POISON!r}) for item in items):
            raise RuntimeError("poisoned")
        return denoise(context, items)

    Group.exchange, module.HANDLERS["denoise"] = exchange_or_fail, denoise_or_fail
"""
"""One member fails while the other waits for it in a block; a request that fails wherever it runs."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path) -> dict[str, Told]:
    """What one rank makes."""
    async with start(tiny_checkpoint) as engine:
        return await run_each(engine, EDITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers look for the faults to simulate."""
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, folder: Path) -> AsyncIterator[AsyncEngine]:
    with pytest.MonkeyPatch.context() as patch:
        shim(folder, patch, FAULTS)
        async with start(tiny_checkpoint, degree=2, workers_per_engine=3, hang_seconds=3.0) as engine:
            yield engine
            assert count(engine, "engine_restarts") == count(engine, "request_retries") == 0


def is_whole(engine: AsyncEngine) -> bool:
    (stats,) = engine.stats
    return stats is not None and all(rank.is_up for rank in stats.ranks)


async def test_pictures_are_those_of_one_rank(engine: AsyncEngine, expected: dict[str, Told]) -> None:
    assert_alike(await run_each(engine, EDITS), expected)
    assert_alike(await ends(await begin(engine, EDITS)), expected)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_member_that_dies_or_hangs_takes_no_other_with_it(
    engine: AsyncEngine, expected: dict[str, Told], rank: int, fault: signal.Signals
) -> None:
    await until(lambda: is_whole(engine))
    before, deaths = processes("worker"), count(engine, "rank_restarts")
    tasks = await begin(engine, EDITS)
    await asyncio.sleep(Random(rank).uniform(0.1, 0.4))
    before[rank].send_signal(fault)
    assert_alike(await ends(tasks), expected)
    await until(lambda: is_whole(engine) and count(engine, "rank_restarts") == deaths + 1)
    assert [old == new for old, new in zip(before, processes("worker"), strict=True)].count(False) == 1


@pytest.mark.slow
async def test_twenty_members_killed_at_random(engine: AsyncEngine, expected: dict[str, Told]) -> None:
    """Nothing is lost or wrong, and steps go on within a second, whatever the killed one was in the middle of."""
    random, gaps, steps = Random(20), list[float](), dict[float, StepSample]()
    for _ in range(20):
        await until(lambda: is_whole(engine))
        tasks = await begin(engine, EDITS)
        await asyncio.sleep(random.uniform(0.0, 0.5))
        started = time.monotonic()
        random.choice(processes("worker")[:2]).kill()
        assert_alike(await ends(tasks), expected)
        steps |= {step.started: step for of_engine in engine.recent_steps for step in of_engine}
        gaps.append(longest_gap([step for step in steps.values() if step.started + step.seconds > started - 0.1]))
    assert 2 in {step.degree for step in steps.values()}
    print(f"longest gaps between steps in ms: {[round(gap * 1e3) for gap in sorted(gaps)]}")
    assert max(gaps) <= 1.0 + max(step.seconds for step in steps.values())


def longest_gap(steps: list[StepSample]) -> float:
    """The longest time in seconds between the end of a step and the start of the next."""
    steps.sort(key=attrgetter("started"))
    return max((after.started - before.started - before.seconds for before, after in pairwise(steps)), default=0.0)


async def test_a_step_in_which_a_member_fails_is_computed_by_one_rank(
    engine: AsyncEngine, expected: dict[str, Told], folder: Path
) -> None:
    tasks = await begin(engine, EDITS)
    (folder / "fail").touch()
    assert_alike(await ends(tasks), expected)
    assert not (folder / "fail").exists(), "it came about"


async def test_a_request_that_fails_alone_fails_without_failing_others(
    engine: AsyncEngine, expected: dict[str, Told]
) -> None:
    tasks = await begin(engine, EDITS)
    with pytest.raises(EngineError, match="RuntimeError: poisoned"):
        await run(engine, f"{POISON}-1", make_input(steps=20))
    assert_alike(await ends(tasks), expected)
