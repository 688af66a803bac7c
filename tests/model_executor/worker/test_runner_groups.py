"""A rank of a batch on several that fails leaves the group before it waits for its device, and the others notice."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from core.errors import GroupBrokenError
from core.messages.worker import Batch, Item, ItemResult
from core.scheduling.ops.denoise import DENOISE
from model_executor.host_weights import ON_DEVICE
from model_executor.parallel import groups as groups_module
from model_executor.parallel.group import Group
from model_executor.parallel.groups import CPU, Groups
from model_executor.worker import runner as runner_module
from model_executor.worker.ops import HANDLERS
from model_executor.worker.runner import Runner

RANKS = (0, 1)
PATIENCE = 20.0


class OnDevice:
    """A process group whose operations return before they are done, as NCCL's: gloo's, and whether it was aborted."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.is_aborted = False

    def alltoall_base(self, *args: Any) -> Any:
        return self._gloo.alltoall_base(*args)

    def abort(self) -> None:
        self.is_aborted = True


class GroupsOnDevice(Groups):
    """As on GPUs, with a process group for each kind of memory."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, PATIENCE)
        self.made: list[OnDevice] = []

    def _group(self, meeting: Any, me: int, degree: int) -> Group:
        seconds = timedelta(seconds=PATIENCE)
        pair = [groups_module._gloo(PrefixStore(name, meeting), me, degree, seconds) for name in ("host", "device")]
        self.made.append(on_device := OnDevice(pair[1]))
        return Group(on_device, me, degree, CPU, pair[0])  # type: ignore[arg-type]


class Ranks:
    """Two ranks, each with a runner. handle: what a rank does in the batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = [GroupsOnDevice(rank) for rank in RANKS]
        exchange = SimpleNamespace(begin_batch=lambda batch: None, finish_batch=lambda: None, take_waited=lambda: 0.0)
        self.graphs_dropped: list[int] = []  # by which ranks
        self.contexts: list[Any] = [
            SimpleNamespace(
                group=None,
                exchange=exchange,
                rank=rank,
                models={"tiny": self._family(rank)},
                weights=lambda model, component: ON_DEVICE.held(),
            )
            for rank in RANKS
        ]
        self.waited: list[int] = []  # ranks that have waited for their device
        item = Item("a", "denoise", "tiny", None, ())  # type: ignore[arg-type]
        self.batch = Batch(0, DENOISE.name, RANKS, (item,), 0, self.groups[0].port)
        self.fails = False
        monkeypatch.setitem(HANDLERS, DENOISE.name, self.handle)

    def _family(self, rank: int) -> Any:
        return SimpleNamespace(drop_graphs=lambda: self.graphs_dropped.append(rank))

    def handle(self, context: Any, items: Sequence[Item]) -> list[ItemResult]:
        if self.fails and context.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [ItemResult(item.request_id, item.node) for item in items]

    def run(self, threads: ThreadPoolExecutor) -> list[Future[Any]]:
        runners = [Runner(rank, self.contexts[rank], self.groups[rank]) for rank in RANKS]
        return [threads.submit(runner.run, self.batch) for runner in runners]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_rank_that_fails_leaves_before_it_waits_and_frees_the_others(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each would wait for the other: its kernels end when all members have queued theirs, or are aborted."""
    ranks.fails = True
    futures: list[Future[Any]] = []

    def synchronize() -> None:
        """Of both ranks, as each fails."""
        assert any(made.is_aborted for each in ranks.groups for made in each.made)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(runner_module, "wait_for_device", lambda: ranks.waited.append(0))
    with ThreadPoolExecutor(2) as threads:
        futures += ranks.run(threads)
        results = [future.result(timeout=PATIENCE) for future in futures]
    assert [result.items[0].failure.kind for result in results] == ["group_broken"] * 2
    assert all(made.is_aborted for each in ranks.groups for made in each.made)
    assert not ranks.waited, "a rank waited for kernels that may never end"
    assert ranks.graphs_dropped == [1], "the rank without memory frees some"


def test_a_group_of_an_earlier_epoch_is_left_when_another_replaces_it(ranks: Ranks) -> None:
    """On a GPU its kernels may wait for a member that has failed."""
    for epoch in range(2):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda rank: ranks.groups[rank].of(RANKS, epoch, ranks.groups[0].port), RANKS))  # noqa: B023
    assert [[made.is_aborted for made in each.made] for each in ranks.groups] == [[True, False], [True, False]]


def test_ranks_that_succeed_meet_and_keep_their_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "wait_for_device", lambda: ranks.waited.append(0))
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            results = [future.result(timeout=PATIENCE) for future in ranks.run(threads)]
        assert [result.items[0].failure for result in results] == [None, None]
    assert len(ranks.waited) == 4
    assert [[made.is_aborted for made in each.made] for each in ranks.groups] == [[False], [False]]


def test_what_is_in_host_memory_does_not_go_through_the_device(ranks: Ranks) -> None:
    class Broken:
        def alltoall_base(self, *args: Any) -> None:
            raise AssertionError

    def member(rank: int) -> Any:
        group = ranks.groups[rank].of(RANKS, 0, ranks.groups[0].port)
        group._process_group = Broken()  # type: ignore[assignment]
        return group.gather(torch.ones(1) * rank, [1, 1]).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(member, RANKS)) == [[0.0, 1.0]] * 2


def test_a_member_that_leaves_breaks_the_meeting(ranks: Ranks) -> None:
    def member(rank: int) -> None:
        group = ranks.groups[rank].of(RANKS, 0, ranks.groups[0].port)
        if rank == 1:
            del group
            ranks.groups[1].abort(RANKS)
        else:
            with pytest.raises(GroupBrokenError, match="left the group"):
                group.meet()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(member, RANKS))
