"""Makes the scheduler's record of a request from what the client sent."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import InvalidRequestError
from core.graph.progress import Progress, preview_steps
from core.graph.workflow import Workflow
from core.messages.engine import EngineRequest
from core.scheduling.request import Request


def new_request(head: EngineRequest, workflows: Mapping[str, Workflow]) -> Request:
    """A request that has not begun. workflows: by name. Raises InvalidRequestError if its own is not among them, or if
    it lacks what this needs.
    """
    workflow = workflows.get(head.workflow)
    if workflow is None:
        raise InvalidRequestError(f"there is no workflow {head.workflow!r}", param="workflow")
    if len(head.rounds) != len(workflow.regions) or min(head.rounds, default=1) < 1:
        message = f"workflow {workflow.name} takes {len(workflow.regions)} numbers of rounds, each at least 1"
        raise InvalidRequestError(message, param="rounds")
    if head.spec.first_pass is None and any(node.canvas for node in workflow.nodes):
        raise InvalidRequestError(f"workflow {workflow.name} takes a first pass", param="first_pass")
    rounds = dict(zip((region.name for region in workflow.regions), head.rounds, strict=True))
    shown = {
        side.name: preview_steps(rounds[workflow.node(side.shows).region], head.spec.num_partial_images)
        for side in workflow.side_nodes
    }
    return Request(head, workflow, Progress(workflow, rounds, shown))
