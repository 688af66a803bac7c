"""Groups: makes process groups over sets of ranks when they are first needed, and keeps them.

Made directly over a store, not by `torch.distributed.new_group`, which needs all processes of the engine to take part,
or hangs when a set grows. Each rank hosts a store on loopback; a group meets at the store of its first member, so one
that cannot be reached has lost a member anyway. After a failure a set of ranks meets again under a new epoch.

Ranks on GPUs, of which each has its own, exchange with NCCL what is there, and with gloo what is in host memory.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import ProcessGroup, is_nccl_available

from core.errors import GroupBrokenError
from model_executor.parallel.group import Group

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")


class Groups:
    """One rank's groups.

    timeout_seconds: how long a member waits for the others within an operation. device: the rank's.
    """

    def __init__(self, rank: int, timeout_seconds: float, device: torch.device = CPU) -> None:
        self._rank = rank
        self._device = device if device.type == "cuda" and is_nccl_available() else CPU  # gloo: through host memory
        self._timeout = timedelta(seconds=timeout_seconds)
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.port: int = listener.getsockname()[1]
            self._own = TCPStore(
                LOOPBACK,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),
            )
        self._groups: dict[tuple[int, ...], tuple[int, Group]] = {}  # ranks -> (epoch, group)
        self._left: dict[tuple[int, ...], int] = {}  # ranks -> the last epoch in which their group was left

    def of(self, ranks: tuple[int, ...], epoch: int, port: int) -> Group:
        """The group of these ranks, this one among them. port: of the first rank's store. Raises GroupBrokenError if
        the others do not come."""
        known = self._groups.get(ranks)
        if known is not None and known[0] == epoch:
            return known[1]
        if known is not None:  # of an earlier epoch, in which members may still wait
            del self._groups[ranks]
            known[1].leave()
            known = None  # its connections close with the last reference
        if epoch <= self._left.get(ranks, -1):
            raise GroupBrokenError(f"the group of the ranks {ranks} was left")
        try:
            group = self._make(ranks, epoch, port)
        except RuntimeError as error:
            raise GroupBrokenError(f"the ranks {ranks} have not met: {error}") from error
        self._groups[ranks] = epoch, group
        return group

    def abort(self, ranks: tuple[int, ...]) -> None:
        """Drop a group in which an operation failed, or will not be called. Members that wait in it fail at once, since
        its connections close with the last reference."""
        known = self._groups.pop(ranks, None)
        if known is not None:
            self._left[ranks] = known[0]
            known[1].leave()

    def _make(self, ranks: tuple[int, ...], epoch: int, port: int) -> Group:
        me = ranks.index(self._rank)
        store = self._own if me == 0 else TCPStore(LOOPBACK, port, is_master=False, timeout=self._timeout)
        meeting = PrefixStore(f"{epoch}:{'-'.join(map(str, ranks))}", store)
        group = self._group(meeting, me, len(ranks))
        group.meet()  # first: NCCL would wait longer for members that do not come
        group.exchange([torch.zeros(1, device=self._device)] * len(ranks), [(1,)] * len(ranks))  # connects
        return group

    def _group(self, meeting: Store, me: int, degree: int) -> Group:
        if self._device.type != "cuda":
            return Group(_gloo(meeting, me, degree, self._timeout), me, degree, CPU)
        on_host = _gloo(PrefixStore("host", meeting), me, degree, self._timeout)
        on_device = _nccl(PrefixStore("device", meeting), me, degree, self._timeout)
        return Group(on_device, me, degree, self._device, on_host)


def _gloo(store: Store, me: int, degree: int, timeout: timedelta) -> ProcessGroup:
    gloo: Any = ProcessGroupGloo  # PyTorch's stubs lack its options
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    made: ProcessGroup = gloo(store, me, degree, options)
    return made


def _nccl(store: Store, me: int, degree: int, timeout: timedelta) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for GPUs have it

    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    made: ProcessGroup = nccl(store, me, degree, options)
    return made
