"""What a server and the process that imports a user's file tell each other."""

from __future__ import annotations

import msgspec

from entrypoints.workflows.import_limits import ImportLimits
from entrypoints.workflows.registered import Registered


class ImportOrder(msgspec.Struct, frozen=True):
    """Import this text."""

    module: str  # name that it gets
    file: str  # where it is from
    source: str
    limits: ImportLimits


class ImportAnswer(msgspec.Struct, frozen=True):
    """Its workflows, or what is wrong."""

    registered: Registered | None = None
    problem: str = ""
    node: str = ""
    input: str = ""
