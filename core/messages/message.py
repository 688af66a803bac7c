"""Message: the base class of all messages that are sent on their own."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """A frozen struct whose encoding contains its class name as `type`, so that unions of messages can be decoded."""
