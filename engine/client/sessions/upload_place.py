"""UploadPlace: the place of one request whose body is being read."""

from __future__ import annotations

import math
import time

from core.errors import OverloadedError
from engine.client.sessions.cancel_scope import CancelScope


class UploadPlace:
    """A `Holder` of one place. Its class is not known yet and counts as the highest: waiting edits leave before it.

    reading: in which the body is read. refusal: set by `refuse`.
    """

    num_images = 1
    priority = -math.inf
    can_be_displaced = True

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.arrival = time.monotonic()
        self.reading = CancelScope()
        self.refusal: OverloadedError | None = None

    def refuse(self, error: OverloadedError) -> None:
        """Have the body read no further."""
        self.refusal = error
        self.reading.cancel()
