"""An entry of the activation cache: a template's pages at one keyframe, or its clean latents."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from core.handles import EntryRef, Tier
from core.messages.worker import PageCopy


class EntryState(enum.Enum):
    """What an entry is on the compute tier. EMPTY: it has a place that somebody must fill."""

    ABSENT = "absent"
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Want:
    """An entry that somebody needs. block_bytes: bytes of one block's page."""

    key: str
    nbytes: int
    block_bytes: int


@dataclass(slots=True)
class Entry:
    """One entry on any tier in memory. `pins`, `uses`, `num_waiting` are written by reserve and release."""

    want: Want
    state: EntryState = EntryState.ABSENT
    ref: EntryRef | None = None  # its place on the compute tier
    pins: int = 0
    uses: int = 0  # reservations since it came
    copy: PageCopy | None = None  # in flight
    source: Tier | None = None  # LOADING: the tier that it comes from
    num_waiting: int = 0  # LOADING: reservations that wait for it
    has_sunk: bool = False  # there is nothing left to copy down
    was_on_disk: bool = False  # its file was read or written: not written again
    is_doomed: bool = False  # dropped: goes once unpinned
    is_kept: bool = True  # it stays when nobody uses it
    is_proven: bool = False  # it was used twice or registered: worth more than what may never be used again
    is_file_doomed: bool = False  # dropped while a copy used its file, which goes once that is over
