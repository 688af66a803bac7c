"""What a denoising step reads, and the ControlNets beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.graph.workflow import Edge
from core.graph.workflows.inpaint import DENOISE
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.families.family_model import failure

_READ_FROM = {"prompt_embeds": "text_encode", "latents": "image_encode"}
"""Value in the language -> node of the shipped graph that makes all that the value stands for."""


def step_edges(connected: Connected) -> Iterator[Edge]:
    """As the step of the shipped graph reads: `prompt_embeds` stand for the lengths of texts, too, and `latents` for
    the sampler's state, which goes from round to round with them, and for mask, condition and noise levels. Raises
    WorkflowError for latents that no round passes on.
    """
    for edge in connected.edges:
        if edge.input == "latents" and not edge.carried:
            problem = "each round needs what the one before has made: latents = denoise(noise_pred, latents)"
            raise failure(connected, "latents", problem)
        if edge.input in _READ_FROM:
            for each in DENOISE.inputs:
                if each.source == _READ_FROM[edge.input]:
                    yield replace(each, source=edge.source, carried=each.carried and edge.carried)
        else:
            yield replace(edge, port="")
