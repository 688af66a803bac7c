"""Results: which of a graph's pictures a request gets."""

from __future__ import annotations

from core.errors import WorkflowError
from entrypoints.workflows.comfy.graph import Graph, Node
from entrypoints.workflows.comfy.latents import Latents
from entrypoints.workflows.comfy.node_class import RESULTS


def last_result(graph: Graph) -> tuple[Node, tuple[Node, ...]]:
    """(the VAEDecode of the last sampler's picture, the nodes whose pictures are left out: of samplers that this one
    goes on from, and pictures that were loaded). Raises WorkflowError if there is no such picture, or if there are two.
    """
    decoders, left_out = dict[str, Node](), list[Node]()  # node that saves -> what it saves
    for node in graph.of(*RESULTS):
        made = node.links["images"].node
        if made.kind == "VAEDecode":
            decoders[node.id] = made
        else:
            left_out.append(node)
    samplers = {id_: _samplers(decoder) for id_, decoder in decoders.items()}
    if not samplers:
        raise WorkflowError("no SaveImage or PreviewImage reads a VAEDecode, so it makes no picture", node="")
    last = max(samplers, key=lambda id_: len(samplers[id_]))
    for id_, behind in samplers.items():
        if behind != samplers[last][: len(behind)]:
            raise graph.nodes[id_].error(f"node {last} has another picture, and a request gets one", "images")
        if len(behind) < len(samplers[last]):
            left_out.append(graph.nodes[id_])
    return decoders[last], tuple(left_out)


def all_results(graph: Graph) -> dict[str, Node]:
    """Node that saves, shows or sends pictures -> the VAEDecode of a sampler's latents, or the LoadImage, that makes
    these. Raises WorkflowError if no node does.
    """
    found = {node.id: node.links["images"].node for node in graph.of(*RESULTS)}
    if not found:
        raise WorkflowError("no SaveImage or PreviewImage is in it, so it makes no picture", node="")
    for made in found.values():
        if made.kind == "VAEDecode":
            _samplers(made)
    return found


def _samplers(decoder: Node) -> list[str]:
    found = Latents.at(decoder.links["samples"]).samplers
    if not found:
        raise decoder.error("no sampler makes what it decodes", "samples")
    return [node.id for node in found]
