"""LateAdapters: adapters that were still loading when a request was sent, so that its first steps may run without."""

from __future__ import annotations

import msgspec


class LateAdapters(msgspec.Struct, frozen=True):
    """From which step on a request has its adapters, all at once. Steps are counted from 0, over all of its loops. From
    0 on, they change the text encoders, too; from later on, the denoiser alone.

    Once it is known, it is the least and the most: a request that is sent again repeats it.
    """

    most: int  # the step that waits for them
    least: int = 0  # no step before has them
    are_loaded: bool = False  # they are, and the patches of the request
