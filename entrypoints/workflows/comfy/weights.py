"""Weights: the files that MODEL, CLIP and VAE of a sampler are from."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoints.workflows.comfy.composition import Named
from entrypoints.workflows.comfy.graph import Node, Source

_OF_MODEL = {"CheckpointLoaderSimple": "ckpt_name", "UNETLoader": "unet_name"}
"""Class that loads a denoiser -> the input that names its file."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A denoiser with its adapters, the last one first."""

    loader: Node
    loras: tuple[Node, ...] = ()

    @classmethod
    def at(cls, source: Source) -> Weights:
        """What a link to a MODEL or CLIP stands for."""
        name = "model" if source.output == 0 else "clip"
        loras = list[Node]()
        while source.node.kind == "LoraLoader":
            loras.append(source.node)
            source = source.node.links[name]
        return cls(source.node, tuple(loras))

    @property
    def named(self) -> Named:
        """The model."""
        name = _OF_MODEL[self.loader.kind]
        return Named(str(self.loader.values[name]), self.loader, name)

    def check_text(self, text: Node) -> None:
        """The text encoders are the model's, with the same adapters. Raises WorkflowError."""
        clip = Weights.at(text.links["clip"])
        if clip.loader.kind == "CheckpointLoaderSimple" and clip.loader is not self.loader:
            raise text.error(f"its text encoders are not those of node {self.loader.id}, the model's", "clip")
        if {node.id for node in clip.loras} != {node.id for node in self.loras}:
            raise text.error(
                "its text encoders have other adapters than the model; read both of each LoraLoader", "clip"
            )

    def check_vae(self, node: Node) -> None:
        """The VAE is the model's. Raises WorkflowError."""
        loader = node.links["vae"].node
        is_own = self.loader.kind == "UNETLoader" and loader.kind == "VAELoader"
        if loader is not self.loader and not is_own:
            raise node.error(f"its VAE is not that of node {self.loader.id}, the model's", "vae")
