"""Groups of ranks: any sets, formed again after a failure, and no member left waiting."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_groups import ThreadGroups

from core.errors import GroupBrokenError
from model_executor.parallel.group import Group, shares
from model_executor.parallel.groups import Groups


@given(st.integers(0, 1000), st.integers(1, 16))
def test_shares_cover_everything_and_differ_by_one_at_most(number: int, degree: int) -> None:
    spans = shares(number, degree)
    assert [place for start, stop in spans for place in range(start, stop)] == list(range(number))
    lengths = [stop - start for start, stop in spans]
    assert max(lengths) - min(lengths) <= 1


@pytest.fixture(scope="module")
def groups() -> ThreadGroups:
    return ThreadGroups(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_sets_may_overlap_grow_and_shrink(groups: ThreadGroups, dtype: torch.dtype) -> None:
    """Members have unequal parts, some of them none."""
    for ranks in ([0, 1], [0, 1, 2, 3], [1, 3], [0, 1], [2, 3], [0, 1, 2]):

        def gather(group: Group) -> torch.Tensor:
            return group.gather(torch.full((group.me, 2), group.me, dtype=dtype), list(range(group.degree)))

        expected = torch.cat([torch.full((member, 2), member, dtype=dtype) for member in range(len(ranks))])
        assert all(torch.equal(found, expected) for found in groups.run(gather, ranks))


def test_every_member_gets_what_was_sent_to_it(groups: ThreadGroups) -> None:
    def exchange(group: Group) -> list[list[float]]:
        parts = [torch.full((to + 1,), 10.0 * group.me + to) for to in range(group.degree)]
        return [part.tolist() for part in group.exchange(parts, [(group.me + 1,)] * group.degree)]

    found = groups.run(exchange, [0, 2, 3])
    assert found == [[[10.0 * source + me] * (me + 1) for source in range(3)] for me in range(3)]


@pytest.mark.gpu
def test_ranks_on_gpus_exchange_with_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def exchange(group: Group) -> tuple[str, list[list[float]]]:
        parts = [torch.full((to + 1,), 10.0 * group.me + to, device="cuda") for to in range(group.degree)]
        found = group.exchange(parts, [(group.me + 1,)] * group.degree)
        return found[0].device.type, [part.tolist() for part in found]

    found = ThreadGroups(2, "cuda").run(exchange, [0, 1])
    assert found == [("cuda", [[10.0 * source + me] * (me + 1) for source in range(2)]) for me in range(2)]


def test_a_member_that_leaves_frees_those_that_wait_and_all_meet_again_in_another_epoch() -> None:
    ranks = [Groups(rank, 30.0) for rank in range(3)]
    everyone, port = (0, 1, 2), ranks[0].port
    left = threading.Event()

    def member(rank: int) -> float:
        group, started = ranks[rank].of(everyone, 0, port), time.monotonic()
        if rank == 1:
            left.wait(10)
            del group
            ranks[rank].abort(everyone)
            return 0.0
        with pytest.raises(GroupBrokenError, match="a rank has left the group"):
            group.gather(torch.zeros(1), [1, 1, 1])
        return time.monotonic() - started

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(member, rank) for rank in everyone]
        time.sleep(0.3)
        left.set()
        assert max(future.result() for future in waiting) < 5.0
    with pytest.raises(GroupBrokenError, match="was left"):
        ranks[1].of(everyone, 0, port)

    def again(rank: int) -> list[float]:
        ranks[rank].abort(everyone)
        return ranks[rank].of(everyone, 1, port).gather(torch.ones(1) * rank, [1, 1, 1]).tolist()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(again, everyone)) == [[0.0, 1.0, 2.0]] * 3


def test_a_member_that_does_not_come_is_not_waited_for_longer_than_the_time_limit() -> None:
    present, absent = Groups(0, 0.5), Groups(1, 0.5)
    started = time.monotonic()
    with pytest.raises(GroupBrokenError, match="have not met"):
        present.of((0, 1), 0, present.port)
    assert time.monotonic() - started < 10.0
    with pytest.raises(GroupBrokenError, match="have not met"):
        absent.of((0, 1), 1, 1)  # nobody listens at this port
