"""AdapterLoads: has all engines that serve a model load further adapters of it, also engines that start again."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Sequence

import msgspec

from core.errors import ConfigError, EngineDeadError, OverloadedError, StencilError
from core.failure import LEAST_RETRY_SECONDS, Failure
from core.ipc.logs import of_request
from core.messages.engine import AdapterAdded, Failed
from core.messages.worker import DropAdapter, LoadAdapter
from engine.router.engine_client import RequestOutput
from engine.router.engine_replica import EngineReplica

logger = logging.getLogger("stencil.router")


class AdapterLoads:
    """replicas: all engines."""

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        self._replicas = replicas
        self._loaded: dict[tuple[str, str], LoadAdapter] = {}  # (model, patch) -> how to load it again

    async def load(self, model: str, name: str, path: str, keep: Collection[str]) -> AdapterAdded:
        """Load an adapter on every engine with its model that is up; on others when they are. Returns what it is.
        Raises InvalidRequestError for a file that cannot be used, EngineDeadError if all engines die meanwhile,
        OverloadedError if none is up; then none has it, unless its patch is among `keep`: those of the model that have
        a name.
        """
        load = LoadAdapter("", model, name, path)
        serving = self._serving(model)
        asked = [replica for replica in serving if replica.is_alive]
        answers = await asyncio.gather(*(self._ask(replica, load) for replica in asked))
        added = [answer for answer in answers if isinstance(answer, AdapterAdded)]
        patches = {answer.patch for answer in added}
        failures = [answer.failure for answer in answers if isinstance(answer, Failed)]
        error = _error(failures, patches)
        if error is not None:
            for patch in patches.difference(keep):
                self.drop(model, patch)
            raise error
        patch = added[0].patch
        load = self._loaded[model, patch] = msgspec.structs.replace(load, patch=patch)
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Failed) and replica.is_alive:  # it has died, and is up again
                self._load_again(replica, load)
        for replica in serving:
            if replica not in asked and replica.is_alive:
                self._load_again(replica, load)
        return added[0]

    def drop(self, model: str, patch: str) -> None:
        """Free an adapter that no request uses any more, on all engines with its model."""
        self._loaded.pop((model, patch), None)
        for replica in self._serving(model):
            replica.drop_adapter(DropAdapter(model, patch))

    def restore(self, replica: EngineReplica) -> None:
        """Load all adapters on an engine that has started again, before it is sent any request."""
        for load in self._loaded.values():
            if load.model in replica.model_names:
                self._load_again(replica, load)

    def _serving(self, model: str) -> list[EngineReplica]:
        return [replica for replica in self._replicas if model in replica.model_names]

    async def _ask(self, replica: EngineReplica, load: LoadAdapter) -> RequestOutput:
        answer: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        try:
            replica.submit(_numbered(load), lambda output: None if answer.done() else answer.set_result(output))
        except EngineDeadError as error:
            return Failed(request_id="", failure=Failure.of(error))
        return await answer

    def _load_again(self, replica: EngineReplica, load: LoadAdapter) -> None:
        def on_answer(output: RequestOutput) -> None:
            if isinstance(output, Failed) and output.failure.kind != "engine_dead":
                text = "engine %d: requests with adapter %s will fail: %s"
                logger.error(text, replica.rank, load.name, output.failure.message, extra=of_request(""))

        try:
            replica.submit(_numbered(load), on_answer)
        except EngineDeadError:
            return  # it will be restored when it is up


def _numbered(load: LoadAdapter) -> LoadAdapter:
    return msgspec.structs.replace(load, request_id=f"adapter-{uuid.uuid4().hex}")


def _error(failures: Sequence[Failure], patches: set[str]) -> StencilError | None:
    """Why an adapter was not loaded; None if it was by every engine that has not died."""
    refusal = next((failure for failure in failures if failure.kind != "engine_dead"), None)
    if refusal is not None:
        return refusal.to_error()
    if not patches:
        if failures:
            return failures[0].to_error()
        return OverloadedError("No engine is up to load the adapter.", retry_after=LEAST_RETRY_SECONDS)
    return None if len(patches) == 1 else ConfigError("the engines have read different files; try again")
