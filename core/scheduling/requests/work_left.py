"""WorkLeft: the work of one request that no rank has been sent yet, in predicted seconds."""

from __future__ import annotations

from typing import NamedTuple


class WorkLeft(NamedTuple):
    """Made by the Predictor."""

    steps: int
    tokens: float  # mean tokens that one of these steps computes, over all of its rows
    keys: float  # mean tokens that one of these steps attends to, over all of its rows
    serving: float  # seconds of what works for these steps: their ControlNets
    before: float  # seconds of the nodes that run once, before the last steps
    after: float  # seconds of the nodes that read what rounds have made
    alone: float  # seconds of all of it on one rank, if no other request shares its batches
