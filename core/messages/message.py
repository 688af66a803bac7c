"""What every tagged message is, whoever receives it."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every tagged message."""
