"""What nodes would read from another model, where several models play the roles of a workflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.graph.workflow import Node, Workflow, outputs_of, role_of

PASSED_ON = ("latents", "mask", "picture")
"""Types of values that one model makes for another: latents for one of the same latent space, masks and pictures for
any. All others are for its own nodes."""


def foreign_read(workflow: Workflow, model: str, players: Mapping[str, str]) -> tuple[str, str] | None:
    """(role, what is wrong with who plays it) if a node would read from another model what only its own can make: text
    embeddings, condition and the sampler's state are each model's own. model: whose pictures it makes. players: role ->
    the other model that plays it.
    """
    for node, source, value in _reads(workflow):
        mine, its = (players.get(role_of(each), model) for each in (node, source))
        if mine != its:
            role = next(role for role in (role_of(node), role_of(source)) if role in players)
            what = f"{role_of(source)} of {its} makes {value} for {role_of(node)} of {mine}"
            return role, f"{what}; one model must play both"
    return None


def _reads(workflow: Workflow) -> Iterator[tuple[Node, Node, str]]:
    """(node, node that it reads, type of the value), without what may be passed on."""
    for node in workflow.nodes:
        for edge in node.inputs:
            source = workflow.node(edge.source)
            kind = next(port.type for port in outputs_of(source) if port.name == edge.name)
            if kind not in PASSED_ON:
                yield node, source, kind
