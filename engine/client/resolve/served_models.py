"""ServedModels: the models that the engines serve, and the engines' configuration with its measured limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from core.config import CacheConfig, EngineConfig
from core.errors import InvalidRequestError, WorkflowError
from core.graph.catalog import with_registered
from core.graph.workflow import Workflow
from core.lora import Lora
from core.model_choice import ModelChoice, choose_model
from core.model_info import ModelInfo
from core.patches import PatchSet
from engine.client.resolve.loading_adapters import LoadingAdapters


class ServedModels:
    """Empty, with the command line's limits, until every engine is ready.

    by_name: name -> info, adapters included. engine: the engines' configuration. workflows: name -> workflow, of those
    that engines run for models; they never change. run_workflows: title -> workflow, of those that `AsyncEngine.run`
    takes: those that users have registered, of their classes alone. loading: adapters that are not in by_name yet.
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
        adapters if that is 0 or None.
        """
        choice = choose_model(self._named, name, loras)
        workflow = self.workflows.get(choice.model.workflow)
        if workflow is not None and workflow.loras:
            own = (Lora(adapter, scale) for adapter, scale in workflow.loras.items())
            choice = choose_model(self._named, choice.model.name, (*own, *choice.loras))
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

    def add(self, info: ModelInfo) -> None:
        """Serve one more adapter."""
        self.by_name = self.by_name | {info.name: info}

    def remove(self, name: str) -> None:
        """Serve an adapter no more."""
        self.by_name = {other: info for other, info in self.by_name.items() if other != name}

    def is_taken(self, name: str) -> bool:
        """Whether a model, an adapter, also one that is loading, or a workflow for pictures has this name."""
        workflow = self.workflows.get(name)
        return name in self._named or (workflow is not None and workflow.is_for_pictures)

    def add_workflow(self, workflow: Workflow) -> Workflow | None:
        """Serve a workflow of classes alone under its title; the one that had the title before."""
        former = self.run_workflows.get(workflow.title)
        self.run_workflows = self.run_workflows | {workflow.title: workflow}
        return former

    def remove_workflow(self, title: str) -> Workflow | None:
        """Serve a workflow of classes alone no more; None: there is none of this title."""
        former = self.run_workflows.get(title)
        self.run_workflows = {other: each for other, each in self.run_workflows.items() if other != title}
        return former

    def set(self, models: dict[str, ModelInfo], engine: EngineConfig) -> None:
        """Set what the engines reported; called once, when all are ready."""
        self.by_name, self.engine = models, engine
