"""Checks that a server has all that a workflow computes a model's pictures with."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import InvalidRequestError
from core.graph.foreign_reads import foreign_read
from core.graph.workflow import Node, Workflow, op_of, role_of
from core.model_info import ModelInfo
from core.run_class import RUN_CLASS


def check_components(workflow: Workflow, model: ModelInfo, models: Mapping[str, ModelInfo]) -> None:
    """Raises InvalidRequestError that names what is missing, and the remedy. model: whose pictures the workflow makes.
    models: that are served, adapters included, by name.
    """
    for node in workflow.nodes:
        if op_of(node).component != RUN_CLASS:
            _check_node(workflow, node, model, models)
    for name in workflow.loras:
        if name not in models or models[name].parent != model.name:
            remedy = "load it with POST /v1/load_lora_adapter, or start the server with it (`loras` in the catalog)"
            raise _refuse(workflow, f"{model.name} has no adapter '{name}'", remedy)
    if found := foreign_read(workflow, model.name, model.roles):
        _, what = found
        raise _refuse(workflow, what.partition("; ")[0], "give both the same role, or none")


def _check_node(workflow: Workflow, node: Node, model: ModelInfo, models: Mapping[str, ModelInfo]) -> None:
    role, kind = role_of(node), op_of(node).component
    if role not in (kind, *model.roles):
        setting = "`refiner`" if role.startswith("refiner") else f"`roles.{role}`"
        remedy = f"start the server with one ({setting} in the catalog's entry of {model.name})"
        raise _refuse(workflow, f"no other model plays the role {role} for {model.name}", remedy, node)
    player = models[model.roles.get(role, model.name)]
    if not player.keys_of(kind):
        remedy = (
            f"start the server with one (`{kind}s` in the catalog)" if kind == "controlnet" else "name another model"
        )
        raise _refuse(workflow, f"{player.name} has no {kind}", remedy, node)


def _refuse(workflow: Workflow, problem: str, remedy: str, node: Node | None = None) -> InvalidRequestError:
    where = f"'{workflow.title}'" if node is None else f"'{workflow.title}', node {node.name}"
    message = f"Invalid workflow: {where}: {problem}; {remedy}."
    return InvalidRequestError(message, param=None if node is None else node.name, code="invalid_workflow")
