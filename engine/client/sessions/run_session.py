"""RunSession: runs a workflow of users' classes for one caller; owns the shared memory of its inputs and results.

As with an edit, memory is freed only when no process can touch it any more; `close` waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import numpy as np

from core.errors import DeadlineExceededError
from core.graph.workflow import Workflow
from core.handles import ArrayRef
from core.messages.engine import Aborted, EngineRequest, Failed, Finished, Output
from core.messages.specs import RunSpec
from core.sampling_params import MAX_INFERENCE_STEPS
from core.validation import check_integer
from engine.client.run_files import RunEncoding, RunResults
from engine.client.run_input import RunInput
from engine.client.run_values import RunValue
from engine.client.services import Services
from engine.client.sessions.class_files import ClassFiles
from engine.client.sessions.class_values import ClassValues
from engine.client.sessions.run_pictures import RunPictures
from engine.client.sessions.running_sessions import shut_down
from engine.client.sessions.session import Session
from engine.client.sessions.session_memory import SessionMemory
from engine.images.image_jobs import Caller

logger = logging.getLogger("stencil.engine")


class RunSession(Session):
    """Called in this order: run or run_files, give_up, close. One caller."""

    def __init__(self, services: Services, request_id: str, asked: RunInput, workflow: Workflow) -> None:
        super().__init__(None, asked.owner, 1, asked.priority)
        self._services = services
        self._id = request_id
        self._asked = asked
        self._workflow = workflow
        self.workflow = workflow.name
        self._memory = SessionMemory(services)
        self._caller = Caller(request_id, asked.owner, asked.priority, self.arrival)
        self._values = ClassValues(workflow, self._memory)
        self._files = ClassFiles(services, workflow, self._memory, self._caller)
        self._places = dict[str, ArrayRef]()  # result -> its memory, uint8 [most bytes]
        self._answer: Output | None = None
        self._is_with_caller = False  # all files are made

    @property
    def waits_for_caller(self) -> bool:
        return self._is_with_caller

    async def run(self) -> dict[str, RunValue]:
        """The results, by name. Raises InvalidRequestError that names the input; OverloadedError,
        DeadlineExceededError, EngineError and its subclasses, of which RunError names the node that has failed.
        """
        async with self._within_time():
            finished = await self._finish()
        return await asyncio.to_thread(self._read, self._places, finished.shapes)

    async def run_files(self, encoding: RunEncoding) -> RunResults:
        """The results, as `run` makes them, with pictures as files. These are valid until `close`."""
        pictures = RunPictures(self._services, encoding, self._memory, self._caller)
        async with self._within_time():
            finished = await self._finish()
            drawn = {name: place for name, place in self._places.items() if self._values.is_picture(name)}
            others = {name: place for name, place in self._places.items() if name not in drawn}
            async with self._services.sessions.until_shutdown():
                made = await pictures.make(drawn, finished.shapes)
            values = await asyncio.to_thread(self._read, others, finished.shapes) if others else {}
        self._is_with_caller = True
        return RunResults(pictures=made, values=values)

    @asynccontextmanager
    async def _within_time(self) -> AsyncIterator[None]:
        """A block that raises DeadlineExceededError when the request's time is over."""
        try:
            async with asyncio.timeout(self._asked.timeout):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError("The request's timeout passed before it finished.") from error

    async def _finish(self) -> Finished:
        """Run it to its end. Raises as `run`."""
        inputs = await self._values.store(self._asked.inputs)
        async with self._services.sessions.until_shutdown():
            files = await self._files.read(self._asked.input_files)
        self._places = self._values.make_places()
        spec = RunSpec(inputs={**inputs, **files}, outputs=self._places)
        self._services.router.submit(self._make_request(spec), self._on_output)
        self.is_submitted = True
        async with self._services.sessions.until_shutdown():
            await self.done.wait()
        match self._answer:
            case Finished():
                return self._answer
            case Failed(failure=failure):
                if failure.detail:
                    logger.error("%s: %s\n%s", self._id, failure.message, failure.detail)
                raise failure.to_error()
            case Aborted():
                raise shut_down()
        raise AssertionError(f"{self._id} runs classes, and was answered with {self._answer}")

    def _make_request(self, spec: RunSpec) -> EngineRequest:
        asked = self._asked
        return EngineRequest(
            request_id=self._id,
            model=self.model,
            workflow=self._workflow.name,
            spec=spec,
            rounds=self._rounds(),
            arrival=self.arrival,
            priority=asked.priority,
            deadline=None if asked.timeout is None else self.arrival + asked.timeout,
            owner=asked.owner,
        )

    def _rounds(self) -> tuple[int, ...]:
        """The number of rounds of each region: the workflow says it, or else the caller does."""
        asked, regions = iter(self._asked.rounds), self._workflow.regions
        rounds = tuple(self._rounds_said(region.rounds) if region.rounds else next(asked, 0) for region in regions)
        return (*rounds, *asked)  # any beyond are refused with the request

    def _rounds_said(self, said: str | int) -> int:
        """Raises InvalidRequestError."""
        if isinstance(said, int):
            return said
        rounds = self._asked.inputs.get(said)
        rounds = int(rounds) if isinstance(rounds, int | np.integer) else 0  # which is missing: its form was checked
        check_integer(said, rounds, 1, MAX_INFERENCE_STEPS)
        return rounds

    def _read(self, places: Mapping[str, ArrayRef], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RunValue]:
        """Copies of results."""
        views = {name: self._services.arena.view(place) for name, place in places.items()}
        return self._values.read(views, shapes)

    def _on_output(self, output: Output) -> None:
        self._answer = output
        self.done.set()

    def give_up(self) -> None:
        if not self.is_submitted:
            self.done.set()
        elif not self.done.is_set():
            self._services.router.abort((self._id,))

    async def close(self) -> None:
        """Wait for the terminal output, then free the memory."""
        await self.done.wait()
        await self._memory.release()
        self._services.images.forget(self._id)
