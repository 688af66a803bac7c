"""Begin: how a loop of denoising steps begins."""

from __future__ import annotations

from dataclasses import dataclass

from core.graph.workflow import Edge, Region


@dataclass(frozen=True, slots=True)
class Begin:
    """Of the node that makes a loop's first values."""

    steps: Region  # the loop's, but for its name
    goes_on: Edge | None = None  # the latents that its first step reads as they are; None: the node's own
    is_second: bool = False  # it noises latents that steps before have made, for a schedule of its own
