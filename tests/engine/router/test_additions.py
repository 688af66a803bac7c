"""Adapters and workflows on several engines, some of which die or start again meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from run_workflows import CLASSES, DIAMOND

from core.errors import ConfigError, EngineDeadError, InvalidRequestError, OverloadedError, RunError
from core.failure import Failure
from core.messages.engine import AdapterAdded, Failed, Output, WorkflowAdded
from core.messages.worker import Addition, DropAdapter, DropWorkflow, LoadWorkflow, Removal
from engine.router.additions import Additions

BAD = Failure("invalid_request", "Invalid 'lora_path': no such file.", param="lora_path")
DEAD = Failure("engine_dead", "it died")


class Engine:
    """Answers loads with `answer`, or when told to."""

    def __init__(
        self, rank: int, answer: str | Failure | None = "p", *, is_alive: bool = True, model: str = "m"
    ) -> None:
        self.rank, self.answer, self.is_alive, self.model_names = rank, answer, is_alive, (model,)
        self.is_draining, self.incarnation = False, object()
        self.loads: list[Any] = []
        self.dropped: list[Removal] = []
        self._waiters: list[Callable[[Output], None]] = []

    def submit(self, load: Addition, waiter: Callable[[Output], None]) -> None:
        if not self.is_alive:
            raise EngineDeadError("it is gone")
        self.loads.append(load)
        self._waiters.append(waiter)
        if self.answer is not None:
            self.tell(self.answer)

    def tell(self, answer: str | Failure) -> None:
        request_id, waiter = self.loads[-1].request_id, self._waiters.pop()
        waiter(Failed(request_id, answer) if isinstance(answer, Failure) else AdapterAdded(request_id, answer))

    def start_again(self, additions: Additions) -> None:
        self.incarnation = object()
        self.loads.clear()
        additions.restore(self)  # type: ignore[arg-type]

    def remove(self, removal: Removal) -> None:
        self.dropped.append(removal)


def make(*engines: Engine) -> Additions:
    return Additions(engines)  # type: ignore[arg-type]


async def load(loads: Additions, *keep: str) -> str:
    return (await loads.load_adapter("m", "hat", "hat.safetensors", keep)).patch


async def test_all_engines_load_it_and_those_that_start_again() -> None:
    engines = [Engine(0), Engine(1), Engine(2, is_alive=False)]
    loads = make(*engines)
    assert await load(loads) == "p"
    assert [len(engine.loads) for engine in engines] == [1, 1, 0]
    engines[2].is_alive = True
    loads.restore(engines[2])  # type: ignore[arg-type]
    (again,) = engines[2].loads
    assert (again.model, again.path, again.patch) == ("m", "hat.safetensors", "p")
    ids = [each.request_id for engine in engines for each in engine.loads]
    assert len(set(ids)) == len(ids)


async def test_engines_without_its_model_are_not_asked() -> None:
    engines = [Engine(0), Engine(1, model="other")]
    loads = make(*engines)
    assert await load(loads) == "p"
    loads.restore(engines[1])  # type: ignore[arg-type]
    loads.remove(DropAdapter("m", "p"))
    assert [(len(engine.loads), len(engine.dropped)) for engine in engines] == [(1, 1), (0, 0)]


async def test_an_engine_that_starts_again_meanwhile_loads_it_afterwards() -> None:
    slow, late, reborn = Engine(0, None), Engine(1, is_alive=False), Engine(2, DEAD)
    loads = make(slow, late, reborn)
    loading = asyncio.create_task(load(loads))
    while not slow.loads:
        await asyncio.sleep(0)
    late.is_alive, late.answer, reborn.answer = True, "p", "p"
    slow.tell("p")
    assert await loading == "p"
    assert [len(engine.loads) for engine in (slow, late, reborn)] == [1, 1, 2]
    assert late.loads[0].patch == reborn.loads[1].patch == "p"


async def test_an_engine_that_starts_again_after_its_answer_loads_it_again() -> None:
    """What not all engines have answered yet is not restored."""
    quick, slow = Engine(0), Engine(1, None)
    loads = make(quick, slow)
    loading = asyncio.create_task(load(loads))
    while not slow.loads:
        await asyncio.sleep(0)
    quick.start_again(loads)
    assert not quick.loads
    slow.tell("p")
    assert await loading == "p"
    assert ([each.patch for each in quick.loads], len(slow.loads)) == (["p"], 1)


@pytest.mark.parametrize("keep", [(), ("p",)])
async def test_a_refusal_is_everyones(keep: tuple[str, ...]) -> None:
    """The adapter stays only where its file has another name."""
    engines = [Engine(0), Engine(1, BAD)]
    loads = make(*engines)
    with pytest.raises(InvalidRequestError, match="no such file") as caught:
        await load(loads, *keep)
    assert caught.value.param == "lora_path"
    assert [engine.dropped for engine in engines] == [[] if keep else [DropAdapter("m", "p")]] * 2
    loads.restore(engines[0])  # type: ignore[arg-type]
    assert len(engines[0].loads) == 1


async def test_engines_that_read_different_files() -> None:
    engines = [Engine(0), Engine(1, "q")]
    with pytest.raises(ConfigError, match="different files"):
        await load(make(*engines))
    assert {adapter.patch for adapter in engines[0].dropped} == {"p", "q"}


async def test_deaths_are_no_refusals_unless_no_engine_is_left() -> None:
    assert await load(make(Engine(0), Engine(1, DEAD, is_alive=True))) == "p"
    with pytest.raises(EngineDeadError, match="it died"):
        await load(make(Engine(0, DEAD)))
    with pytest.raises(OverloadedError, match="No engine is up"):
        await load(make(Engine(0, is_alive=False)))


async def test_a_dropped_adapter_is_not_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(0)
    loads = make(engine)
    await load(loads)
    engine.answer = BAD
    with caplog.at_level(logging.ERROR):
        loads.restore(engine)  # type: ignore[arg-type]
    assert "requests with adapter hat will fail" in caplog.text
    loads.remove(DropAdapter("m", "p"))
    assert engine.dropped == [DropAdapter("m", "p")]
    loads.restore(engine)  # type: ignore[arg-type]
    assert len(engine.loads) == 2


WORKFLOW = LoadWorkflow.of(replace(DIAMOND, name="diamond@1"), CLASSES)


class WorkflowEngine(Engine):
    """Answers loads of workflows."""

    def tell(self, answer: str | Failure) -> None:
        request_id, waiter = self.loads[-1].request_id, self._waiters.pop()
        waiter(Failed(request_id, answer) if isinstance(answer, Failure) else WorkflowAdded(request_id, "diamond@1"))


async def test_all_engines_take_a_workflow_in_use_whatever_their_models() -> None:
    engines = [WorkflowEngine(0), WorkflowEngine(1, model="other"), WorkflowEngine(2, is_alive=False)]
    additions = make(*engines)
    await additions.load_workflow(WORKFLOW)
    assert [len(engine.loads) for engine in engines] == [1, 1, 0]
    engines[2].is_alive = True
    additions.restore(engines[2])  # type: ignore[arg-type]
    (again,) = engines[2].loads
    assert msgspec.structs.replace(again, request_id="") == WORKFLOW
    additions.remove(DropWorkflow("diamond@1"))
    assert [engine.dropped for engine in engines] == [[DropWorkflow("diamond@1")]] * 3
    additions.restore(engines[0])  # type: ignore[arg-type]
    assert len(engines[0].loads) == 1


@pytest.mark.parametrize(
    ("answers", "raised"),
    [(("p", BAD), InvalidRequestError), ((DEAD, DEAD), EngineDeadError), ((DEAD, Failure("run_failed", "")), RunError)],
)
async def test_a_workflow_that_is_refused_stays_nowhere(
    answers: tuple[str | Failure, ...], raised: type[Exception]
) -> None:
    engines = [WorkflowEngine(rank, answer) for rank, answer in enumerate(answers)]
    additions = make(*engines)
    with pytest.raises(raised):
        await additions.load_workflow(WORKFLOW)
    assert [engine.dropped for engine in engines] == [[DropWorkflow("diamond@1")]] * 2
    additions.restore(engines[0])  # type: ignore[arg-type]
    assert len(engines[0].loads) == 1
