"""How engines take workflows in use while they serve: under names that no other content has, all of them or none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from core.errors import EngineDeadError, OverloadedError
from core.failure import LEAST_RETRY_SECONDS
from core.messages.codec import encode
from core.messages.worker import LoadWorkflow
from engine.router.router import Router


def named_by_content(load: LoadWorkflow) -> LoadWorkflow:
    """The same load, of a workflow whose name ends with `@` and a digest of all that engines get of it."""
    digest = hashlib.sha256(encode(load)).hexdigest()[:16]
    return msgspec.structs.replace(load, workflow=replace(load.workflow, name=f"{load.workflow.name}@{digest}"))


async def load_workflows(router: Router, loads: Sequence[LoadWorkflow]) -> None:
    """Have all engines take these in use, or none. Raises as `Router.add_workflow`, but OverloadedError if engines died
    meanwhile.
    """
    begun = list[LoadWorkflow]()
    try:
        for load in loads:
            begun.append(load)  # an engine may have it even if this is cancelled before it has answered
            await router.add_workflow(load)
    except BaseException as error:
        for load in begun:
            router.drop_workflow(load.removal)
        if isinstance(error, EngineDeadError):
            message = "The engines were restarted meanwhile; try again."
            raise OverloadedError(message, retry_after=LEAST_RETRY_SECONDS) from error
        raise
