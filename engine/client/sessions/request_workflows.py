"""RequestWorkflows: workflows for pictures that requests bring with them, which engines have while these run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.workflow import Workflow
from core.messages.worker import DropWorkflow, LoadWorkflow
from engine.client.services import Services
from engine.client.sessions.workflow_loads import load_workflows, named_by_content

MAX_KEPT = 64
"""Workflows that engines keep when no request runs them, so that the next request need not wait for them."""


class RequestWorkflows:
    """Engines know each by its name and a digest of its content: requests with the same graph share it. It has no
    classes of users, so no worker loads anything for it.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._changing = asyncio.Lock()  # held while what engines have is changed
        self._num_users: dict[str, int] = {}  # name -> blocks of `use` that are open; the one used longest ago first

    @asynccontextmanager
    async def use(self, workflow: Workflow) -> AsyncIterator[str]:
        """The name under which engines have a workflow while the context is open, and as long as sessions that began in
        it run. Its defaults and adapters are the caller's to apply. Raises WorkflowError for one that cannot run, or
        that names users' classes; OverloadedError if no engine can take it.
        """
        load = named_by_content(LoadWorkflow.of(replace(workflow, defaults={}, loras={}), ()))
        name = load.workflow.name
        async with self._services.sessions.until_shutdown():
            await self._take(load)
        try:
            yield name
        finally:
            self._num_users[name] -= 1
            self._services.sessions.run_in_background(self._forget_old())

    def has(self, name: str) -> bool:
        """Whether engines have a workflow under this name that a request has brought."""
        return name in self._num_users

    async def _take(self, load: LoadWorkflow) -> None:
        """Count a user of a workflow, which engines then have."""
        workflow = load.workflow
        async with self._changing:
            if workflow.name not in self._num_users:
                _check(workflow)
                await load_workflows(self._services.router, [load])
                self._services.served.workflows[workflow.name] = workflow
            self._num_users[workflow.name] = self._num_users.pop(workflow.name, 0) + 1

    async def _forget_old(self) -> None:
        """Have engines forget what is too much, those first that were used longest ago."""
        async with self._changing:
            running = {session.workflow for session in self._services.sessions}
            idle = [name for name, users in self._num_users.items() if not users and name not in running]
            for name in idle[: max(0, len(self._num_users) - MAX_KEPT)]:
                del self._num_users[name]
                del self._services.served.workflows[name]
                self._services.router.drop_workflow(DropWorkflow(name))


def _check(workflow: Workflow) -> None:
    """Raises WorkflowError."""
    if workflow.has_own_ports:
        raise WorkflowError(f"workflow {workflow.title}: a request brings no classes of users", node="")
    check_workflow(workflow)
