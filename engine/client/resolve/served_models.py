"""ServedModels: the models that the engines serve, and the engines' configuration with its measured limits."""

from __future__ import annotations

from core.config import CacheConfig, EngineConfig
from core.errors import WorkflowError
from core.graph.catalog import with_registered
from core.graph.workflow import Workflow
from core.model_choice import ModelChoice
from core.model_info import ModelInfo


class ServedModels:
    """Empty, with the command line's limits, until every engine is ready.

    by_name: name -> info, adapters included. engine: the engines' configuration. workflows: name -> workflow, of those
    that engines run for models, from the start, or because a request has brought it. run_workflows: title -> workflow,
    of those that `AsyncEngine.run` takes: those that users have registered, of their classes alone.
    """

    def __init__(self, engine: EngineConfig) -> None:
        """Raises WorkflowError for a registered workflow that cannot run, or that has the name of a model."""
        self.by_name: dict[str, ModelInfo] = {}
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

    def has(self, choice: ModelChoice) -> bool:
        """Whether all adapters of a choice that was made earlier still have a name."""
        named = {info.patch for info in self.by_name.values() if info.parent == choice.model.name}
        return {patch.id for patch in choice.patches} <= named

    def add(self, info: ModelInfo) -> None:
        """Serve one more adapter."""
        self.by_name = self.by_name | {info.name: info}

    def remove(self, name: str) -> None:
        """Serve an adapter no more."""
        self.by_name = {other: info for other, info in self.by_name.items() if other != name}

    def is_taken(self, name: str) -> bool:
        """Whether a model, an adapter, or a workflow for pictures has this name."""
        workflow = self.workflows.get(name)
        return name in self.by_name or (workflow is not None and workflow.is_for_pictures)

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
