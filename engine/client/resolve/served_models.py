"""ServedModels: the models that the engines serve, and the engines' configuration with its measured limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from core.config import CacheConfig, EngineConfig
from core.errors import InvalidRequestError, WorkflowError
from core.graph.catalog import with_registered, with_variants
from core.graph.workflow import Workflow
from core.lora import Lora
from core.model_choice import ModelChoice, choose_model
from core.model_info import ModelInfo
from core.patches import PatchSet
from engine.client.resolve.loading_adapters import LoadingAdapters

T = TypeVar("T")


class ServedModels:
    """Empty, with the command line's limits, until every engine is ready.

    by_name: name -> info, adapters included. A workflow that was registered while the server runs, and makes a model's
    pictures, is a name here, too: its info is the model's, whose name it keeps, but for workflow and roles. engine: the
    engines' configuration. workflows: name -> workflow, of those that engines run for models, some
    of which requests have brought. run_workflows: title ->
    workflow, of those that `AsyncEngine.run` takes: those that users have registered, of their classes alone.
    loading: adapters that are not in by_name yet.
    """

    def __init__(self, engine: EngineConfig) -> None:
        """Raises WorkflowError for a registered workflow that cannot run, or that has the name of a model."""
        self.by_name: dict[str, ModelInfo] = {}
        self.loading = LoadingAdapters()
        self.workflows = with_registered(engine.workflows, {each.name for each in engine.classes})
        self.run_workflows = {each.title: each for each in engine.workflows if not each.is_for_pictures}
        self.engine = engine
        for name in (name for model in engine.models for name in (model.name, *(each.name for each in model.adapters))):
            if name in self.run_workflows:
                raise WorkflowError(f"workflow {name}: a model has this name; give it another", node="")

    @property
    def cache(self) -> CacheConfig:
        """The engines' limits for cached pages."""
        return self.engine.cache

    def choose(self, name: str, loras: Sequence[Lora], steps_without: int | None) -> ModelChoice:
        """What a request names, see `choose_model`, whose errors it raises, after the adapters of the model's workflow.
        steps_without: the most first steps that it may make without adapters that are still loading, unless the
        workflow says more; None: it makes no steps, and needs them at once. Raises InvalidRequestError for such
        adapters if that is 0 or None, and where one of the workflow's adapters was unloaded.
        """
        choice = choose_model(self._named, name, loras)
        workflow = self.workflows.get(choice.model.workflow)
        if workflow is not None and workflow.loras:
            if lacking := [each for each in workflow.loras if not self.is_adapter(each, choice.model.name)]:
                why = f"its workflow {workflow.title} has the adapter '{lacking[0]}', which was unloaded; load it again"
                raise InvalidRequestError(f"Invalid 'model': {why}.", param="model")
            own = (Lora(adapter, scale) for adapter, scale in workflow.loras.items())
            named = name if name and not self._named[name].parent else choice.model.name
            choice = choose_model(self._named, named, (*own, *choice.loras))
            steps_without = None if steps_without is None else max(steps_without, workflow.steps_without_lora)
        late = next((lora.name for lora in choice.loras if lora.scale and self.loading.find(lora.name)), "")
        if not late:
            return choice
        if not steps_without:
            advice = "try again" if steps_without is None else "try again, or give 'steps_without_lora'"
            message = f"Invalid 'lora': '{late}' is still loading; {advice}."
            raise InvalidRequestError(message, param="lora", code="adapter_loading")
        return replace(choice, patches=(), steps_without=steps_without)

    @property
    def _named(self) -> dict[str, ModelInfo]:
        """Name -> info, of what requests may name; of an adapter that is still loading, as far as it is known."""
        if not self.loading:
            return self.by_name
        models = {name: self.by_name[model] for name, model in self.loading.models.items()}
        own = {name: msgspec.structs.replace(model, name=name, parent=model.name) for name, model in models.items()}
        return self.by_name | own

    async def loaded(self, choice: ModelChoice) -> PatchSet:
        """The patches of a choice that was made when some of its adapters were loading, once they are not. Raises
        InvalidRequestError for one that cannot be loaded or was unloaded, and other StencilErrors of its load.
        """
        await self.loading.wait(choice.loras)
        return choose_model(self.by_name, choice.model.name, choice.loras).patches

    def has(self, choice: ModelChoice) -> bool:
        """Whether all adapters of a choice that was made earlier still have a name."""
        if choice.steps_without:
            return all(lora.name in self._named for lora in choice.loras)
        named = {info.patch for info in self.by_name.values() if info.parent == choice.model.name}
        return {patch.id for patch in choice.patches} <= named

    def is_adapter(self, name: str, model: str) -> bool:
        """Whether an adapter of this model has this name, also one that is still loading."""
        info = self._named.get(name)
        return info is not None and info.parent == model

    def add(self, info: ModelInfo) -> None:
        """Serve one more adapter."""
        self.by_name = self.by_name | {info.name: info}

    def remove(self, name: str) -> None:
        """Serve an adapter no more."""
        self.by_name = _without(self.by_name, name)

    def is_taken(self, name: str) -> bool:
        """Whether a model, an adapter, also one that is loading, or a workflow for pictures has this name."""
        workflow = self.workflows.get(name)
        is_model = name in self._named and name not in self.added
        return is_model or (workflow is not None and workflow.is_for_pictures)

    @property
    def registered(self) -> dict[str, str]:
        """Title -> name of the workflow, of those that may be replaced and removed: those of classes alone, and those
        that were registered while the server runs."""
        return {title: each.name for title, each in self.run_workflows.items()} | self.added

    @property
    def added(self) -> dict[str, str]:
        """Title -> name of the workflow, of those that make a model's pictures, and were registered while the server
        runs."""
        return {name: info.workflow for name, info in self.by_name.items() if name != info.name}

    def add_workflow(self, workflow: Workflow, model: ModelInfo | None = None) -> None:
        """Serve a workflow under its title, instead of the one that had it. model: whose pictures it makes; None:
        classes compute all of it."""
        title = workflow.title
        if model is None:
            self.by_name = _without(self.by_name, title)
            self.run_workflows = self.run_workflows | {title: workflow}
            return
        self.run_workflows = _without(self.run_workflows, title)
        self.workflows = self.workflows | {each.name: each for each in with_variants(workflow)}
        self.by_name = self.by_name | {title: msgspec.structs.replace(model, workflow=workflow.name)}

    def remove_workflow(self, title: str) -> None:
        """Serve one of the registered workflows no more."""
        self.by_name, self.run_workflows = _without(self.by_name, title), _without(self.run_workflows, title)

    def forget_workflow(self, name: str) -> None:
        """Forget a workflow that has no name any more, and no request."""
        if (gone := self.workflows.get(name)) is not None:
            variants = {each.name for each in with_variants(gone)}
            self.workflows = {other: each for other, each in self.workflows.items() if other not in variants}

    def set(self, models: dict[str, ModelInfo], engine: EngineConfig) -> None:
        """Set what the engines reported; called once, when all are ready."""
        self.by_name, self.engine = models, engine


def _without(named: Mapping[str, T], name: str) -> dict[str, T]:
    return {other: each for other, each in named.items() if other != name}
