"""Conditioning: what a sampler is told to paint, or to avoid."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoints.workflows.comfy.graph import Node, Source
from entrypoints.workflows.comfy.weighted_text import plain_text

_UPWARDS = {
    "FluxGuidance": ("conditioning",),
    "ControlNetApply": ("conditioning",),
    "ControlNetApplyAdvanced": ("positive", "negative"),
    "InpaintModelConditioning": ("positive", "negative"),
}
"""Class -> for each of its outputs the input that this is made of."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Each of the nodes on its way, in the order of execution."""

    text: Node
    guidance: Node | None  # the last one that says it
    controls: tuple[Node, ...]
    inpainting: Node | None

    @classmethod
    def at(cls, source: Source) -> Conditioning:
        """What a link to a conditioning stands for. Raises WorkflowError."""
        passed = list[Node]()
        while source.node.kind in _UPWARDS:
            passed.append(source.node)
            source = source.node.links[_UPWARDS[source.node.kind][source.output]]
        inpainting = [node for node in passed if node.kind == "InpaintModelConditioning"]
        if inpainting[1:]:
            raise inpainting[0].error("a picture is edited once; there is another node of this class before")
        guidances = [node for node in passed if node.kind == "FluxGuidance"]
        controls = tuple(node for node in reversed(passed) if node.kind.startswith("ControlNet"))
        return cls(source.node, next(iter(guidances), None), controls, next(iter(inpainting), None))

    @property
    def words(self) -> str:
        """The prompt. Raises WorkflowError if its words have weights."""
        try:
            return plain_text(str(self.text.values["text"]))
        except ValueError as error:
            raise self.text.error(str(error), "text") from error
