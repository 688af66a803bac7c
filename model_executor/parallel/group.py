"""Group: the ranks that compute one batch together, as one of them sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroup

from core.errors import GroupBrokenError
from model_executor.kernels.ragged import Span


def shares(number: int, degree: int) -> list[Span]:
    """`number` things as consecutive spans for `degree` members, as even as they go."""
    return [(number * member // degree, number * (member + 1) // degree) for member in range(degree)]


class Group:
    """Collective operations of one member. All members call the same operations in the same order.

    me: this member's number, 0..degree - 1. device: in whose memory the process group exchanges. A failed operation
    raises GroupBrokenError: a member died, left the group, or did not come in time. The group is of no use then.

    With NCCL, an operation returns before it is done, and a member that waits for its device cannot see that another
    one has left. So such a group has another process group, `on_host`: for what is in host memory, which then waits for
    no GPU, and to `meet` before the wait.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        me: int,
        degree: int,
        device: torch.device,
        on_host: ProcessGroup | None = None,
    ) -> None:
        self._process_group, self._device, self._on_host = process_group, device, on_host
        self.me, self.degree = me, degree

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send parts[i] to member i; returns what each member has sent, of these shapes. All of one dtype, on one
        device."""
        device, counts = parts[0].device, [part.numel() for part in parts]
        process_group, through = self._process_group, self._device
        if self._on_host is not None and device.type == "cpu":
            process_group, through = self._on_host, device
        sent = torch.cat([part.reshape(-1) for part in parts]).to(through)
        expected = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(expected))
        try:
            process_group.alltoall_base(received, sent, expected, counts, AllToAllOptions()).wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"a rank has left the group: {error}") from error
        split = received.to(device).split(expected)
        return [part.view(tuple(shape)) for part, shape in zip(split, shapes, strict=True)]

    def meet(self) -> None:
        """Wait until every member has queued all its operations on its device: only then is it certain that those that
        were queued here end.

        A member that waits for room in its device's queue does not come here. CUDA's holds about 1,024 kernels, and a
        step of several members can have more: if another member fails, their first operation never ends, the queue
        stays full, and this member is stuck until NCCL's watchdog ends its process, after the group's time limit.
        """
        if self._on_host is not None:
            self.exchange([torch.zeros(1)] * self.degree, [(1,)] * self.degree)

    def leave(self) -> None:
        """End this member's operations on its device, which may wait for members that have failed."""
        if self._on_host is not None:
            self._process_group.abort()

    def gather(self, mine: Tensor, lengths: Sequence[int]) -> Tensor:
        """The rows of all members, one member below the other. mine: [rows, ...]; lengths: every member's rows."""
        received = self.exchange([mine] * self.degree, [(length, *mine.shape[1:]) for length in lengths])
        return torch.cat(received)
