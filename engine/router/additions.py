"""Additions: has all engines take further adapters and workflows in use while they serve, also engines that start
again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

import msgspec

from core.errors import ConfigError, EngineDeadError, OverloadedError, StencilError
from core.failure import LEAST_RETRY_SECONDS, Failure
from core.ipc.logs import of_request
from core.messages.engine import AdapterAdded, Failed, Output
from core.messages.worker import Addition, DropAdapter, LoadAdapter, LoadWorkflow, Removal
from engine.router.engine_replica import EngineReplica

logger = logging.getLogger("stencil.router")

A = TypeVar("A", LoadAdapter, LoadWorkflow)


class Additions:
    """replicas: all engines, a view that changes as they do."""

    def __init__(self, replicas: Collection[EngineReplica]) -> None:
        self._replicas = replicas
        self._made: dict[Removal, Addition] = {}  # what undoes it -> how to make it again

    async def load_adapter(self, model: str, name: str, path: str, keep: Collection[str]) -> AdapterAdded:
        """Load an adapter on every engine with its model that is up; on others when they are. Returns what it is.
        Raises InvalidRequestError for a file that cannot be used, EngineDeadError if all engines die meanwhile,
        OverloadedError if none is up; then none has it, unless its patch is among `keep`: those of the model that have
        a name.
        """
        load = LoadAdapter("", model, name, path)
        answers = await self._ask_all(load)
        added = [answer for answer in answers.values() if isinstance(answer, AdapterAdded)]
        patches = {answer.patch for answer in added}
        error = _error(answers.values(), patches)
        if error is not None:
            for patch in patches.difference(keep):
                self.remove(DropAdapter(model, patch))
            raise error
        patch = added[0].patch
        self._keep(DropAdapter(model, patch), msgspec.structs.replace(load, patch=patch), answers)
        return added[0]

    async def load_workflow(self, load: LoadWorkflow) -> None:
        """Have every engine with its model that is up take a workflow in use; others when they are. Raises
        InvalidRequestError for a class that workers cannot import or load, RunError if that ends them, EngineDeadError
        if all engines die meanwhile, OverloadedError if none is up; then none has it.
        """
        answers = await self._ask_all(load)
        added = {load.workflow.name for answer in answers.values() if not isinstance(answer, Failed)}
        error = _error(answers.values(), added)
        if error is not None:
            self.remove(load.removal)
            raise error
        self._keep(load.removal, load, answers)

    def remove(self, removal: Removal) -> None:
        """Free what no request uses any more, on all engines that have it."""
        self._made.pop(removal, None)
        for replica in self._having(removal):
            replica.remove(removal)

    def restore(self, replica: EngineReplica) -> None:
        """Have an engine that has started again take all of this in use, before it is sent any request."""
        for removal, load in self._made.items():
            if replica in self._having(removal):
                self._make_again(replica, load)

    def _having(self, what: Addition | Removal) -> list[EngineReplica]:
        """The engines that it is for: those with its model, if it is of one, that get requests."""
        return [
            replica
            for replica in self._replicas
            if not replica.is_draining and (not what.model or what.model in replica.model_names)
        ]

    async def _ask_all(self, load: A) -> dict[Hashable, Output]:
        """Incarnation of an engine -> its answer, of those that are up."""
        asked = [replica for replica in self._having(load) if replica.is_alive]
        incarnations = [replica.incarnation for replica in asked]  # some may start again before all have answered
        answers = await asyncio.gather(*(self._ask(replica, load) for replica in asked))
        return dict(zip(incarnations, answers, strict=True))

    async def _ask(self, replica: EngineReplica, load: A) -> Output:
        answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        try:
            replica.submit(_numbered(load), lambda output: None if answer.done() else answer.set_result(output))
        except EngineDeadError as error:
            return Failed(request_id="", failure=Failure.of(error))
        return await answer

    def _keep(self, removal: Removal, load: A, answers: Mapping[Hashable, Output]) -> None:
        """Note what all engines that have answered have, but for those that have died; others take it in use now."""
        self._made[removal] = load
        for replica in self._having(load):
            answer = answers.get(replica.incarnation)  # None: it was down, or has started again
            if replica.is_alive and isinstance(answer, Failed | None):
                self._make_again(replica, load)

    def _make_again(self, replica: EngineReplica, load: Addition) -> None:
        def on_answer(output: Output) -> None:
            if isinstance(output, Failed) and output.failure.kind != "engine_dead":
                text = "engine %d: requests with %s will fail: %s"
                logger.error(text, replica.rank, _named(load), output.failure.message, extra=of_request(""))

        try:
            replica.submit(_numbered(load), on_answer)
        except EngineDeadError:
            return  # it will be restored when it is up


def _numbered(load: Addition) -> Addition:
    return msgspec.structs.replace(load, request_id=f"addition-{uuid.uuid4().hex}")


def _named(load: Addition) -> str:
    return f"workflow {load.workflow.title}" if isinstance(load, LoadWorkflow) else f"adapter {load.name}"


def _error(answers: Collection[Output], added: Collection[str]) -> StencilError | None:
    """Why it was not taken in use; None if it was by every engine that has not died. added: what engines have then."""
    failures = [answer.failure for answer in answers if isinstance(answer, Failed)]
    refusal = next((failure for failure in failures if failure.kind != "engine_dead"), None)
    if refusal is not None:
        return refusal.to_error()
    if not added:
        if failures:
            return failures[0].to_error()
        return OverloadedError("No engine is up.", retry_after=LEAST_RETRY_SECONDS)
    return None if len(added) == 1 else ConfigError("the engines have read different files; try again")
