"""RunSession: runs a workflow of users' classes for one caller; owns the shared memory of its inputs and results.

As with an edit, memory is freed only when no process can touch it any more; `close` waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import DeadlineExceededError, InvalidRequestError
from core.graph.form import Form
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from core.handles import ArrayRef
from core.messages.engine import Aborted, EngineRequest, Failed, Finished
from core.messages.specs import RunSpec
from core.sampling_params import MAX_INFERENCE_STEPS
from core.validation import check_integer
from engine.client.run_input import RunInput
from engine.client.run_values import RunValue, array_at, from_array, to_array
from engine.client.services import Services
from engine.client.sessions.running_sessions import shut_down
from engine.client.sessions.session import Session
from engine.client.sessions.session_memory import SessionMemory
from engine.router.engine_client import RequestOutput

logger = logging.getLogger("stencil.engine")


class RunSession(Session):
    """Called in this order: run, give_up, close. One caller."""

    def __init__(self, services: Services, request_id: str, asked: RunInput, workflow: Workflow) -> None:
        super().__init__(None, asked.owner, 1, asked.priority)
        self._services = services
        self._id = request_id
        self._asked = asked
        self._workflow = workflow
        self._memory = SessionMemory(services)
        self._places = dict[str, ArrayRef]()  # result -> its memory, uint8 [most bytes]
        self._answer: RequestOutput | None = None

    async def run(self) -> dict[str, RunValue]:
        """The results, by name. Raises InvalidRequestError that names the input; OverloadedError,
        DeadlineExceededError, EngineError and its subclasses, of which RunError names the node that has failed.
        """
        try:
            async with asyncio.timeout(self._asked.timeout):
                spec = RunSpec(inputs=await self._store_inputs(), outputs=self._make_places())
                self._services.router.submit(self._make_request(spec), self._on_output)
                self.is_submitted = True
                async with self._services.sessions.until_shutdown():
                    await self.done.wait()
        except TimeoutError as error:
            raise DeadlineExceededError("The request's timeout passed before it finished.") from error
        match self._answer:
            case Finished():
                return await asyncio.to_thread(self._read, self._answer.shapes)
            case Failed(failure=failure):
                if failure.detail:
                    logger.error("%s: %s\n%s", self._id, failure.message, failure.detail)
                raise failure.to_error()
            case Aborted():
                raise shut_down()
        raise AssertionError(f"{self._id} runs classes, and was answered with {self._answer}")

    async def _store_inputs(self) -> dict[str, ArrayRef]:
        """Check the inputs, beside the event loop, and copy them to shared memory."""
        arrays = await asyncio.to_thread(self._checked_inputs)
        return {name: await self._memory.store_array(array) for name, array in arrays.items()}

    def _checked_inputs(self) -> dict[str, npt.NDArray[Any]]:
        return {name: to_array(name, self._form(name), value) for name, value in self._asked.inputs.items()}

    def _form(self, name: str) -> Form:
        port = port_of(self._workflow.inputs, name)
        if port is None or port.form is None:
            known = ", ".join(each.name for each in self._workflow.inputs) or "none"
            what = f"workflow {self._workflow.name} has no such input; there are {known}"
            raise InvalidRequestError(f"Invalid '{name}': {what}.", param=name)
        return port.form

    def _make_places(self) -> dict[str, ArrayRef]:
        """Memory for the results, of the greatest size that is declared; it is taken when it is written."""
        self._places = {name: self._memory.alloc(form.nbytes) for name, form in self._result_forms.items()}
        return self._places

    @property
    def _result_forms(self) -> Mapping[str, Form]:
        workflow = self._workflow
        found = {
            name: port_of(workflow.node(maker).makes, workflow.output_ports[name])
            for name, maker in workflow.outputs.items()
        }
        return {name: port.form for name, port in found.items() if port is not None and port.form is not None}

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
        """Of each region: what the workflow says of it, or else the caller."""
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

    def _read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RunValue]:
        """Copies of the results."""
        view, forms = self._services.arena.view, self._result_forms
        arrays = {name: array_at(form, view(self._places[name]), shapes[name]).copy() for name, form in forms.items()}
        return {name: from_array(forms[name], array) for name, array in arrays.items()}

    def _on_output(self, output: RequestOutput) -> None:
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
