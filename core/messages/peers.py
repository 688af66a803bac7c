"""Messages to a worker's inbox, see `core.ipc.peer_sockets`: from other ranks, and from the engine about them."""

from __future__ import annotations

from core.handles import TensorKey, TensorRef
from core.messages.message import Message


class Parcel(Message, frozen=True, omit_defaults=True):
    """A value that a batch of the receiver reads deferred; its bytes travel with the message."""

    seq: int  # of the plan with this batch; what comes for a plan that is over, or was another process's, is dropped
    key: TensorKey
    ref: TensorRef | None = None  # describes the data; None: the value was not made
    # Of a series that travels while it is made:
    start: int = 0  # number of its first tensor that is in the data
    is_last: bool = True  # the data ends with its last tensor


class RankGone(Message, frozen=True):
    """A rank has died. What it has not sent for the plans before `seq` will not come, and it wants nothing of them."""

    rank: int
    seq: int


ToInbox = Parcel | RankGone
