"""Groups whose members are threads of this process, which is cheaper than processes and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from model_executor.parallel.group import Group
from model_executor.parallel.groups import Groups

T = TypeVar("T")

SECONDS = 30.0


class ThreadGroups:
    """The ranks of an engine, each a thread with its own Groups."""

    def __init__(self, num_ranks: int, device: str = "cpu") -> None:
        """device: type of the ranks' devices."""
        self._devices = [torch.device(device, rank) for rank in range(num_ranks)]
        self._ranks = [Groups(rank, SECONDS, device) for rank, device in enumerate(self._devices)]
        self._epoch = 0

    def run(self, function: Callable[[Group], T], ranks: Sequence[int]) -> list[T]:
        """Call the function on each of these ranks at once; what each returns. Raises the first rank's error."""
        members = tuple(ranks)
        port = self._ranks[members[0]].port

        def member(rank: int) -> T:
            torch.set_num_threads(1)
            if self._devices[rank].type == "cuda":
                torch.cuda.set_device(self._devices[rank])
            with torch.inference_mode():
                try:
                    return function(self._ranks[rank].of(members, self._epoch, port))
                except Exception:
                    self._ranks[rank].abort(members)
                    raise

        try:
            with ThreadPoolExecutor(len(members)) as threads:
                return [future.result() for future in [threads.submit(member, rank) for rank in members]]
        except Exception:
            self._epoch += 1
            raise
