"""Composition: what a ComfyUI graph means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.graph.workflow import Literal
from entrypoints.workflows.comfy.graph import Node


@dataclass(frozen=True, slots=True)
class Named:
    """A file that a graph names, and the node that does."""

    file: str
    node: Node
    input: str

    @property
    def name(self) -> str:
        """What it is served as: the file's name without its folder and its ending."""
        stem = self.file.replace("\\", "/").rpartition("/")[2]
        base, dot, ending = stem.rpartition(".")
        return base if dot and ending.lower() in _ENDINGS else stem


_ENDINGS = ("safetensors", "sft", "ckpt", "pt", "pth", "bin", "gguf")


@dataclass(frozen=True, slots=True)
class Control:
    """A picture that steers the steps, by a ControlNet. start, end: as shares of the steps that are run."""

    net: Named
    picture: Node  # that loads it
    scale: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Pass:
    """The steps of one sampler."""

    node: Node
    total: int  # steps of the whole schedule
    steps: int  # that are run, the last ones of it
    seed: int
    sampler: str
    schedule: str
    is_refiner: bool = False
    begin: float = 0.0  # of all noise levels, the highest counted as 0 and the lowest as 1
    end: float = 1.0
    starts_over: bool = False  # at full strength, too, its noise is over a picture or latents

    @property
    def is_whole(self) -> bool:
        """Whether all steps of the schedule are run."""
        return self.steps == self.total

    @property
    def goes_on(self) -> bool:
        """Whether it goes on with the noise of the pass before."""
        return self.begin > 0.0


@dataclass(frozen=True, slots=True)
class Composition:
    """One picture's."""

    passes: tuple[Pass, ...]
    model: Named
    refiner: Named | None = None
    decodes_with_refiner: bool = False
    loras: Mapping[str, float] = field(default_factory=dict)  # name -> scale
    lora_files: tuple[Named, ...] = ()
    controls: tuple[Control, ...] = ()
    picture: Node | None = None  # that loads what is edited
    mask: Node | None = None  # that loads the mask
    scale: float = 1.0  # how many times smaller the first pass is
    method: str = "bilinear"  # that enlarges its latents
    defaults: Mapping[str, Literal] = field(default_factory=dict)  # field of requests -> what the graph says
    left_out: tuple[Node, ...] = ()  # whose pictures are no result
    number: int = 1  # of pictures

    @property
    def is_enlarged(self) -> bool:
        """Whether the first pass is smaller than the picture."""
        return self.scale != 1.0
