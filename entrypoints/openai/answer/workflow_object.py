"""Builds what GET /v1/models says of workflows of users' classes."""

from __future__ import annotations

from typing import Any

from core.graph.form import Form
from core.graph.op import Port
from core.graph.workflow import Workflow
from entrypoints.openai.fields.own_fields import FIELD_KINDS, OwnFields


def workflow_object(workflow: Workflow, created: int) -> dict[str, Any]:
    """The entry of a workflow that requests may name in a model's place. created: Unix seconds."""
    head = {"id": workflow.title, "object": "model", "created": created, "owned_by": "stencil", "modality": "workflow"}
    return head | own_ports(workflow)


def own_ports(workflow: Workflow | None) -> dict[str, Any]:
    """`inputs` and `outputs` of users' classes, if there are any, with their types and greatest sizes. Of a workflow of
    a model, its prompt and picture are left out; `partial_images` is whether requests may ask for these.
    """
    if workflow is None or not workflow.has_own_ports:
        return {}
    own = OwnFields.of(workflow)
    inputs = [_shown(port, port.form) | _range(own, port) | {"required": not port.is_optional} for port in own.ports]
    ports = {"inputs": inputs, "outputs": [_shown(port, port.form) for port in workflow.own_results]}
    return ports if own.is_alone else ports | {"partial_images": workflow.has_previews}


def _range(own: OwnFields, port: Port) -> dict[str, Any]:
    """The range of a number that says how many rounds a loop has; others have none of their own."""
    if port.name not in own.counters:
        return {}
    return {"minimum": own.fields[port.name].low, "maximum": own.fields[port.name].high}


def _shown(port: Port, form: Form | None) -> dict[str, Any]:
    assert form is not None, "ports of classes have forms"
    shown: dict[str, Any] = {"name": port.name, "type": FIELD_KINDS.get(form.kind, form.kind)}
    match form.kind:
        case "text":
            shown["max_bytes"] = form.size
        case "picture":
            shown |= {"max_width": form.shape[1], "max_height": form.shape[0]}
        case "tensor":
            shown |= {"dtype": form.dtype, "max_shape": form.shape}
    return shown
