"""ServedGraph: a ComfyUI graph as a model of a server."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from core.config import EngineConfig, ModelConfig
from core.errors import WorkflowError
from core.graph.workflow import Workflow
from entrypoints.workflows.comfy.composition import Composition, Named
from entrypoints.workflows.comfy.graph import shown
from entrypoints.workflows.comfy.graph_file import GraphFile
from entrypoints.workflows.comfy.model_scheduler import ModelScheduler


def with_graphs(engine: EngineConfig, files: Sequence[GraphFile]) -> EngineConfig:
    """A configuration, among whose workflows are those of the files, with a model for each. An engine that has the
    model that a graph names has the graph's, too. Raises WorkflowError.
    """
    models, engines = engine.models, dict(engine.engines)
    by_name = {workflow.name: workflow for workflow in engine.workflows}
    for file in files:
        served = ServedGraph(file, engine.models)
        models = (*models, served.model())
        by_name[file.name] = served.workflow(by_name[file.name])
        base = served.base.name
        engines = {rank: (*names, file.name) if base in names else names for rank, names in engines.items()}
    return msgspec.structs.replace(engine, models=models, engines=engines, workflows=tuple(by_name.values()))


@dataclass(frozen=True)
class ServedGraph:
    """It is served under its name by the model that it names: one of this name, without its file's folder and ending.
    So are its adapters, ControlNets and refiner.
    """

    file: GraphFile
    models: Sequence[ModelConfig]  # of the server, without graphs

    def model(self) -> ModelConfig:
        """The model that it is. It has the weights of the one that the graph names, which are loaded once. Raises
        WorkflowError that names the node for what is not served.
        """
        base, name = self.base, self.file.name
        composition = self.file.composition
        if name in (known := [each.name for each in self.models]):
            raise WorkflowError(f"{self.file.path}: a model is called {name}; rename the file", node="")
        adapters = {each.name: each for each in base.adapters}
        refiner = base.refiner
        with self._in_file():
            for named in composition.lora_files:
                check_served(named, adapters, f"adapter of {base.name}")
            for control in composition.controls:
                check_served(control.net, base.controls, f"control type of {base.name}")
            if composition.refiner is not None:
                check_served(composition.refiner, known, "model")
                refiner = composition.refiner.name
            second = next((ModelScheduler.read(each) for each in self.models if each.name == refiner), None)
            check_samplers(composition, ModelScheduler.read(base), second)
        return msgspec.structs.replace(
            base,
            served_model_name=name,
            workflow=name,
            refiner=refiner,
            adapters=tuple(
                msgspec.structs.replace(adapters[lora], name=self._adapter(lora)) for lora in composition.loras
            ),
        )

    @property
    def base(self) -> ModelConfig:
        """The served model that the graph names. Raises WorkflowError."""
        named = self.file.composition.model
        with self._in_file():
            check_served(named, [each.name for each in self.models], "model")
        return next(each for each in self.models if each.name == named.name)

    def workflow(self, read: Workflow) -> Workflow:
        """The workflow that was read, with the adapters of its model: adapters have names of their own in a server."""
        return replace(read, loras={self._adapter(name): scale for name, scale in read.loras.items()})

    def _adapter(self, name: str) -> str:
        return f"{self.file.name}:{name}"

    @contextmanager
    def _in_file(self) -> Iterator[None]:
        """Have errors name the file."""
        try:
            yield
        except WorkflowError as error:
            raise WorkflowError(f"{self.file.path}: {error}", node=error.node, input=error.input) from error


def check_served(named: Named, known: Collection[str], what: str) -> None:
    """Raises WorkflowError for a file by whose name nothing is served."""
    if named.name not in known:
        problem = f"no {what} is called {shown(named.name)}; there are {', '.join(known) or 'none'}"
        raise named.node.error(problem, named.input)


def check_samplers(composition: Composition, base: ModelScheduler, refiner: ModelScheduler | None) -> None:
    """Raises WorkflowError for a sampler that the models' schedulers do not do, as far as their files are here."""
    for each in composition.passes:
        scheduler = refiner if each.is_refiner and refiner is not None else base
        if problem := scheduler.why_not(each.sampler, each.schedule):
            raise each.node.error(f"{scheduler.model} cannot do that: {problem}", "sampler_name")
