"""The catalog: workflows by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from core.errors import WorkflowError
from core.graph.check import check_workflow
from core.graph.controlling import controlled
from core.graph.recalling import can_recall, recalling
from core.graph.selecting import selecting
from core.graph.workflow import Workflow, op_of, role_of
from core.graph.workflows.class_conditional import CLASS_CONDITIONAL
from core.graph.workflows.embed_prompt import EMBED_PROMPT
from core.graph.workflows.find_mask import FIND_MASK
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED

NAMED = (INPAINT, HIRES, CLASS_CONDITIONAL, REFINED)
"""The workflows that a model may name for its requests, beside registered ones that make pictures."""

CONTROLLED = {workflow: controlled(workflow) for workflow in (INPAINT, HIRES, REFINED)}
"""Workflow -> the same with ControlNets."""

SELECTED = tuple(map(selecting, (*CONTROLLED, *CONTROLLED.values())))
"""Workflows that find their mask, each made of one that is given it."""

FURTHER = (FIND_MASK, recalling(INPAINT), EMBED_PROMPT)

WORKFLOWS: dict[str, Workflow] = {
    workflow.name: workflow for workflow in (*NAMED, *CONTROLLED.values(), *SELECTED, *FURTHER)
}
"""Name -> workflow, for all that engines run. Of several that take what a request gives, the first serves it."""


def with_registered(registered: Iterable[Workflow], classes: Collection[str]) -> dict[str, Workflow]:
    """WORKFLOWS with those that a user has registered, and with their variants for ControlNets, for masks that are
    found and for approximate caching. classes: names of the classes that play roles in these. Raises WorkflowError for
    one that cannot run, one whose name is taken, and a role that no class plays.
    """
    found = dict(WORKFLOWS)
    for workflow in (each for one in registered for each in with_variants(one)):
        if not workflow.name or workflow.name in found:
            raise WorkflowError(f"a workflow {workflow.name!r} is here already; give it another name", node="")
        check_workflow(workflow)
        found[workflow.name] = workflow
        for node in workflow.nodes:
            if op_of(node).has_own_ports and role_of(node) not in classes:
                known = f"{', '.join(classes) or 'none'}; register it (classes)"
                problem = f"its role {role_of(node)} is played by no class: there are {known}"
                raise WorkflowError(f"workflow {workflow.name}, node {node.name}: {problem}", node=node.name)
    return found


def with_variants(workflow: Workflow) -> Iterator[Workflow]:
    """A workflow, and those that serve requests with ControlNets, whose mask is to be found, or from the state of an
    earlier one, instead. One that has such nodes itself has no such variant. Raises WorkflowError if it has others of
    their names.
    """
    yield workflow
    ops = {node.op for node in workflow.nodes}
    takes_mask = "segment" not in ops and any(port.type == "mask" for port in workflow.inputs)
    steered = [controlled(workflow)] if {"text_encode", "denoise"} <= ops and "controlnet" not in ops else []
    yield from steered
    yield from map(selecting, [workflow, *steered] if takes_mask else [])
    yield from [recalling(workflow)] if can_recall(workflow) else []
