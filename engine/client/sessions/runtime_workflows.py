"""RuntimeWorkflows: registers workflows of users, and takes them away, while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from core.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from core.graph.workflow import Workflow
from core.messages.codec import encode
from core.messages.worker import DropWorkflow, LoadWorkflow
from core.model_info import ModelInfo
from core.run_class import RunClass
from core.validation import check_matches, shorten
from engine.client.resolve.bound_model import BoundModel
from engine.client.services import Services
from engine.client.sessions.workflow_loads import load_workflows, named_by_content

MAX_WORKFLOWS = 1024
"""Names of workflows, those from the start included."""

NAME = r"[\w.-]{1,64}"
"""Names of workflows: an answer that a hostile file has forged may have any."""

MAX_BYTES = 512 * 1024
"""Most bytes of the messages for all workflows that engines have taken in use while they serve. A worker that is
restarted is sent them at once, and half of its ring remains for plans."""

FIRST_MODEL = BoundModel()
"""Of a registration that names no model."""


class RuntimeWorkflows:
    """A name is served once every engine that is up has imported and loaded the classes, and a workflow kept until no
    name and no request has it. Engines know it by its name and a digest of its content, so that they have several of
    one name while requests run on the former one. One that makes a model's pictures is a name for this model with
    another workflow: engines get no further model, and requests of the two share all that is loaded and cached.
    """

    def __init__(self, services: Services, changing: asyncio.Lock) -> None:
        """changing: held while names or what engines have are changed, of adapters, too."""
        self._services = services
        self._changing = changing
        self._loads: dict[str, LoadWorkflow] = {}  # name with digest -> how engines have got it
        self._first = {each.name: each for each in services.config.engine.classes}  # classes from the start

    async def register(
        self, workflows: Sequence[Workflow], classes: Iterable[RunClass], bound: BoundModel = FIRST_MODEL
    ) -> None:
        """Serve these workflows, which were checked, instead of those of the same names. classes: that they name, with
        their text, all of one file. bound: for those that make a model's pictures. Raises InvalidRequestError for a
        name that is taken, for what the server lacks, and for a class that workers cannot import or load; RunError if
        that ends them; ModelNotFoundError, OverloadedError; then nothing has changed.
        """
        known = {each.name: each for each in classes}
        async with self._services.sessions.until_shutdown(), self._changing:
            bound.check_use(workflows)
            self._check_names([each.name for each in workflows])
            models = [self._model_of(each, bound) for each in workflows]
            loads = [self._load_of(each, known, model) for each, model in zip(workflows, models, strict=True)]
            await self._load([each for each in loads if each.workflow.name not in self._loads])
            for load, model in zip(loads, models, strict=True):
                self._serve(load.workflow, model)

    def remove(self, name: str) -> None:
        """Serve a workflow no more. Requests that run it end as they began. Raises ModelNotFoundError."""
        former = self._services.served.registered.get(name)
        if former is None:
            raise ModelNotFoundError(name)
        self._services.served.remove_workflow(name)
        self._services.sessions.run_in_background(self._drop(former))

    def _model_of(self, workflow: Workflow, bound: BoundModel) -> ModelInfo | None:
        """The model whose pictures a workflow makes; None: classes compute all of it. Raises InvalidRequestError."""
        if not workflow.is_for_pictures:
            return None
        return bound.info_for(workflow, self._services.served.by_name, self._services.config.engine)

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises InvalidRequestError."""
        served = self._services.served
        for name in names:
            check_matches("workflow", name, NAME, "1 to 64 letters, digits and _ . -")
            if served.is_taken(name):
                message = f"Invalid workflow: '{name}' is the name of a model, or of a workflow for models; rename it."
                raise InvalidRequestError(message, code="name_taken")
        if len(served.registered.keys() | {*names}) > MAX_WORKFLOWS:
            message = f"Invalid workflow: {MAX_WORKFLOWS} workflows are served already; delete another one first."
            raise InvalidRequestError(message, code="too_many_workflows")

    def _load_of(self, workflow: Workflow, classes: dict[str, RunClass], model: ModelInfo | None) -> LoadWorkflow:
        """How engines get a workflow. Raises InvalidRequestError."""
        if lacking := sorted(workflow.class_names - classes.keys()):
            message = f"Invalid workflow: '{workflow.name}' names a class '{shorten(lacking[0])}' that it has not."
            raise InvalidRequestError(message, code="invalid_workflow")
        mine = [classes[name] for name in sorted(workflow.class_names)]
        return named_by_content(LoadWorkflow.of(workflow, mine, model))

    async def _load(self, loads: Sequence[LoadWorkflow]) -> None:
        """Have all engines take these in use, or none. Raises as `register`."""
        self._check_classes(loads)
        if sum(len(encode(each)) for each in (*self._loads.values(), *loads)) > MAX_BYTES:
            message = (
                f"Invalid workflow: what is registered while the server runs may take {MAX_BYTES} bytes together, "
                "texts and graphs; delete another one, or shorten this."
            )
            raise InvalidRequestError(message, code="too_many_workflows")
        await load_workflows(self._services.router, loads)
        self._loads |= {load.workflow.name: load for load in loads}

    def _check_classes(self, loads: Iterable[LoadWorkflow]) -> None:
        """Raises InvalidRequestError for a class that engines have otherwise: its name says only where it is."""
        known = {name: each.without_text for name, each in self._first.items()}
        for each in (each for load in (*self._loads.values(), *loads) for each in load.classes):
            if known.setdefault(each.name, each) != each:
                message = (
                    f"Invalid workflow: workers have class '{each.name}' with other attributes (dtype, seconds, "
                    "load_seconds, nbytes), as its module was; restart the server for the new ones."
                )
                raise InvalidRequestError(message, code="invalid_workflow")

    def _serve(self, workflow: Workflow, model: ModelInfo | None) -> None:
        served = self._services.served
        former = served.registered.get(workflow.title)
        served.add_workflow(workflow, model)
        if former is not None and former != workflow.name:
            self._services.sessions.run_in_background(self._drop(former))

    async def _drop(self, name: str) -> None:
        """Have engines free a workflow once no request runs it, unless it is served again by then, or they end."""
        sessions = self._services.sessions
        try:
            await sessions.wait_while_any(lambda session: session.workflow == name)
        except OverloadedError:
            return
        async with self._changing:
            served = self._services.served
            if name not in served.registered.values() and not any(session.workflow == name for session in sessions):
                load = self._loads.pop(name, None)
                self._services.router.drop_workflow(DropWorkflow(name) if load is None else load.removal)
                served.forget_workflow(name)
