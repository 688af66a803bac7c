"""ControlType: a kind of control picture, by which requests choose a ControlNet of their model."""

from __future__ import annotations

import msgspec


class ControlType(msgspec.Struct, frozen=True):
    """What a control type of a model stands for."""

    net: str  # name of the ControlNet
    mode: int | None = None  # of one for several kinds of pictures: the number of the kind
    is_joint: bool = False  # it sees all pictures of a request together, and goes with no other; set by the worker
