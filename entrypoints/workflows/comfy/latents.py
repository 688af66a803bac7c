"""Latents: what samplers begin with, and the samplers in a row that go on from one another."""

from __future__ import annotations

from dataclasses import dataclass, field

from entrypoints.workflows.comfy.graph import Node, Source

MAX_PASSES = 8
"""Most samplers in a row."""

SAMPLERS = ("KSampler", "KSamplerAdvanced")
ENLARGERS = ("LatentUpscale", "LatentUpscaleBy")
EMPTY = ("EmptyLatentImage", "EmptySD3LatentImage")


@dataclass(slots=True)
class Latents:
    """Of a result."""

    samplers: list[Node] = field(default_factory=list)  # in the order of execution
    enlarger: Node | None = None  # between the first two samplers
    mask_setter: Node | None = None  # a SetLatentNoiseMask
    begin: Node | None = None  # makes the first latents

    @property
    def first(self) -> Node:
        """What makes the first latents."""
        assert self.begin is not None, "a chain of latents has a beginning"
        return self.begin

    @classmethod
    def at(cls, source: Source) -> Latents:
        """What a link to latents stands for. Raises WorkflowError."""
        found, enlargers = cls(), dict[str, Node]()  # sampler -> what enlarges the latents that it reads
        while found.begin is None:
            node = source.node
            if node.kind in SAMPLERS:
                source = found._sampled(node)
            elif node.kind in ENLARGERS:
                source = found._enlarged(node, enlargers)
            elif node.kind == "SetLatentNoiseMask":
                source = found._masked(node)
            else:
                found.begin = node
        found.samplers.reverse()
        for place, sampler in enumerate(found.samplers):
            if (enlarger := enlargers.get(sampler.id)) is not None:
                if place != 1:
                    raise enlarger.error("the latents of the first sampler alone can be enlarged", "samples")
                found.enlarger = enlarger
        return found

    def _sampled(self, node: Node) -> Source:
        if self.mask_setter is not None:
            raise self.mask_setter.error("a mask is set before the first sampler, for all of them", "samples")
        if len(self.samplers) == MAX_PASSES:
            raise node.error(f"there may be {MAX_PASSES} samplers in a row")
        self.samplers.append(node)
        return node.links["latent_image"]

    def _enlarged(self, node: Node, enlargers: dict[str, Node]) -> Source:
        if not self.samplers:
            raise node.error("no sampler goes on with what it makes")
        sampler = self.samplers[-1]
        if sampler.id in enlargers or self.mask_setter is not None:
            raise node.error("latents are enlarged once, between two samplers")
        enlargers[sampler.id] = node
        return node.links["samples"]

    def _masked(self, node: Node) -> Source:
        if not self.samplers or self.mask_setter is not None:
            raise node.error("one mask is set, for samplers")
        self.mask_setter = node
        return node.links["samples"]
