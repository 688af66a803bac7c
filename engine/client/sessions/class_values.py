"""ClassValues: what nodes of users' classes are given and make for one call, in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from core.errors import InvalidRequestError
from core.graph.form import Form
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from core.handles import ArrayRef
from engine.client.run_values import RunValue, array_at, from_array, to_array
from engine.client.sessions.session_memory import SessionMemory


class ClassValues:
    """The values of one call. memory: that of its session, which frees it."""

    def __init__(self, workflow: Workflow, memory: SessionMemory) -> None:
        self._workflow = workflow
        self._memory = memory
        self._results = {port.name: port.form for port in workflow.own_results if port.form is not None}

    async def store(self, inputs: Mapping[str, RunValue]) -> dict[str, ArrayRef]:
        """Check inputs, beside the event loop, and copy them to shared memory. Raises InvalidRequestError that names
        the input, OverloadedError if there is no room.
        """
        arrays = await asyncio.to_thread(self._checked, inputs) if inputs else {}
        return {name: await self._memory.store_array(array) for name, array in arrays.items()}

    def _checked(self, inputs: Mapping[str, RunValue]) -> dict[str, npt.NDArray[Any]]:
        return {name: to_array(name, self._form(name), value) for name, value in inputs.items()}

    def _form(self, name: str) -> Form:
        port = port_of(self._workflow.own_inputs, name)
        if port is None or port.form is None:
            known = ", ".join(each.name for each in self._workflow.own_inputs) or "none"
            what = f"workflow {self._workflow.title} has no such input; there are {known}"
            raise InvalidRequestError(f"Invalid '{name}': {what}.", param=name)
        return port.form

    def make_places(self) -> dict[str, ArrayRef]:
        """Memory for the results of one request, uint8 [most bytes] each; it is taken when it is written. Raises
        OverloadedError if there is no room.
        """
        return {name: self._memory.alloc(form.nbytes) for name, form in self._results.items()}

    def read(
        self, places: Mapping[str, npt.NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, RunValue]:
        """Copies of some results. places: theirs, as `make_places` made them. shapes: as the engine tells them."""
        found = dict[str, RunValue]()
        for name, form in self._results.items():
            if name in places:
                found[name] = from_array(form, array_at(form, places[name], shapes[name]).copy())
        return found

    def is_picture(self, name: str) -> bool:
        """Whether a result is a picture."""
        return self._results[name].kind == "picture"
