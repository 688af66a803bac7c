"""Entry: the state of one entry of the activation cache: a template's pages at one keyframe, or its clean latents."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from core.cache.memory_tier import MemoryTier
from core.handles import EntryRef, Tier
from core.messages.worker import PageCopy


class EntryState(enum.Enum):
    """State of an entry on the compute tier. EMPTY: it has a place, and its content has yet to be primed."""

    ABSENT = "absent"
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class WantedEntry:
    """An entry that a reservation needs."""

    key: str
    nbytes: int
    block_bytes: int  # bytes of one block's page
    is_shared: bool = False  # read by several ranks: it is used in host memory


@dataclass(slots=True)
class Entry:
    """One entry on any tier in memory. Written by the ActivationCacheManager."""

    want: WantedEntry
    # Written when it is placed on its compute tier; kept while it has no place there.
    compute: MemoryTier  # where it must be to be used: a rank's device tier, or the host tier
    rank: int  # the rank of that device; in host memory the rank that copies it to and from disk
    # Its place; written when it is placed, filled, loaded or evicted.
    state: EntryState = EntryState.ABSENT
    ref: EntryRef | None = None  # its place on the compute tier
    # Users; written by reserve and release.
    pins: int = 0  # reservations that hold it
    uses: int = 0  # reservations since it was created
    # Copies; written when one starts or ends.
    copy: PageCopy | None = None  # in flight
    source: Tier | None = None  # LOADING: the tier that it comes from
    num_waiting: int = 0  # LOADING: reservations that wait for it
    has_sunk: bool = False  # there is nothing left to copy down
    was_on_disk: bool = False  # its file was read or written, and is not written again
    # Its worth; written by register, drop and uses.
    is_doomed: bool = False  # dropped: removed once unpinned
    is_kept: bool = True  # it stays while unused
    is_proven: bool = False  # used twice or registered: evicted after others
    is_file_doomed: bool = False  # dropped while a copy used its file, which is deleted after the copy
