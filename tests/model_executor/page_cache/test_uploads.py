"""The order of blocks on their way to a GPU, on a fake stream that copies at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from model_executor.page_cache.uploads import BLOCKS_AHEAD, PageUpload, Uploads

BLOCK, NUM_BLOCKS = 64, 6
NBYTES = NUM_BLOCKS * BLOCK - 10


class Event:
    is_over = False

    def synchronize(self) -> None:
        self.is_over = True


class Stream:
    """The part of `CopyStream` that uploads use."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.followed: list[tuple[object, int]] = []  # (event, copies queued before)

    def follow(self, ready: object) -> None:
        self.followed.append((ready, len(self.events)))

    def load(self, host: Tensor, device: Tensor) -> Event:
        device.copy_(host)
        self.events.append(event := Event())
        return event

    def finish(self) -> None:
        for event in self.events:
            event.synchronize()


class Bench:
    """Uploads by name, and what became of them."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.uploads = Uploads(self.stream)  # type: ignore[arg-type]
        self.awaited: set[str] = set()
        self.queued: list[tuple[str, int]] = []
        self.ended: dict[str, tuple[float, Exception | None]] = {}
        self.devices: dict[str, Tensor] = {}

    def add(self, name: str, order: Iterable[int] = range(NUM_BLOCKS), room: int = NBYTES) -> None:
        self.devices[name] = torch.zeros(room, dtype=torch.uint8)
        ready: Any = name

        def queued(block: int, event: object) -> None:
            assert event is self.stream.events[-1]
            self.queued.append((name, block))

        def end(seconds: float, error: Exception | None) -> None:
            self.ended[name] = seconds, error

        self.uploads.add(
            PageUpload(
                key=name,
                host=content(),
                device=self.devices[name],
                block_bytes=BLOCK,
                ready=ready,
                order=iter(order),
                is_awaited=lambda: name in self.awaited,
                on_queued=queued,
                on_end=end,
            )
        )

    @property
    def under_way(self) -> int:
        """Blocks that are queued and not copied."""
        return sum(not event.is_over for event in self.stream.events)

    def steps(self) -> Iterator[None]:
        while self.uploads.advance():
            yield

    def run(self) -> str:
        """Until none is left; the names of all blocks in their order."""
        for _ in self.steps():
            pass
        return "".join(name for name, _ in self.queued)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def content() -> Tensor:
    return torch.randint(0, 256, [NBYTES], dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_what_no_step_waits_for_comes_entry_by_entry_a_few_blocks_at_a_time(bench: Bench) -> None:
    order = [3, 4, 0, 1, 2, 5]
    bench.add("a", order)
    bench.add("b")
    for _ in bench.steps():
        assert bench.under_way < BLOCKS_AHEAD
        assert ("a" in bench.ended) == (len(bench.queued) >= NUM_BLOCKS + BLOCKS_AHEAD - 1)
    assert bench.queued == [("a", block) for block in order] + [("b", block) for block in range(NUM_BLOCKS)]
    assert all(torch.equal(device, content()) for device in bench.devices.values())
    assert [error for _, error in bench.ended.values()] == [None, None]
    assert bench.stream.followed == [("a", 0), ("b", NUM_BLOCKS)]  # what is behind it does not hold an earlier one up


def test_what_a_step_waits_for_is_queued_at_once_in_turns(bench: Bench) -> None:
    bench.add("near")
    bench.add("far")
    bench.awaited |= {"near", "far"}
    bench.uploads.advance()
    names = [name for name, _ in bench.queued]
    assert names == ["near", "far"] * NUM_BLOCKS
    assert bench.under_way == 2 * NUM_BLOCKS - 1
    bench.run()
    assert [error for _, error in bench.ended.values()] == [None, None]


def test_what_a_step_begins_to_wait_for_overtakes_all_that_is_not_queued(bench: Bench) -> None:
    for name in "abc":
        bench.add(name)
    bench.uploads.advance()
    bench.awaited |= {"b", "c"}
    assert bench.run() == BLOCKS_AHEAD * "a" + NUM_BLOCKS * "bc" + (NUM_BLOCKS - BLOCKS_AHEAD) * "a"


def test_a_wait_queues_the_rest_of_an_entry_that_is_under_way(bench: Bench) -> None:
    """The one that has fewer blocks yet catches up first."""
    bench.add("a")
    bench.uploads.advance()
    bench.add("b")
    bench.awaited |= {"a", "b"}
    behind = NUM_BLOCKS - BLOCKS_AHEAD
    assert bench.run() == BLOCKS_AHEAD * "a" + BLOCKS_AHEAD * "b" + behind * "ab"


def test_what_no_step_waits_for_can_be_held_back_until_nothing_is_queued(bench: Bench) -> None:
    for name in "ab":
        bench.add(name)
    bench.uploads.advance()
    bench.awaited.add("b")
    assert not bench.uploads.is_idle
    while not bench.uploads.is_idle:
        assert bench.uploads.advance(awaited_only=True)
    assert "".join(name for name, _ in bench.queued) == BLOCKS_AHEAD * "a" + NUM_BLOCKS * "b"
    assert bench.under_way == 0
    assert [bench.uploads.has(name) for name in "ab"] == [True, False]
    bench.awaited.add("a")
    assert not bench.uploads.is_idle
    bench.run()
    assert list(bench.ended) == ["b", "a"]


def test_the_time_between_uploads_is_not_theirs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("model_executor.page_cache.uploads.time.monotonic", lambda: clock[0])
    bench.add("a")
    bench.uploads.advance()
    while not bench.uploads.is_idle:
        bench.uploads.advance(awaited_only=True)
    clock[0] = 100.0  # another job was done
    bench.run()
    assert bench.ended == {"a": (0.0, None)}


def test_an_entry_that_fails_has_no_copy_under_way_and_does_not_hurt_others(bench: Bench) -> None:
    bench.add("short", room=BLOCK + 9)
    bench.add("whole")
    bench.awaited |= {"short", "whole"}
    bench.run()
    assert isinstance(bench.ended["short"][1], RuntimeError)
    assert bench.ended["whole"][1] is None
    assert torch.equal(bench.devices["whole"], content())
    assert bench.under_way == 0


def test_the_seconds_of_overlapping_uploads_are_shared_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model predicts a copy by the seconds that one takes."""
    clock = iter(range(100))
    monkeypatch.setattr("model_executor.page_cache.uploads.time.monotonic", lambda: next(clock))
    bench = Bench()
    bench.add("near")
    bench.add("far")
    bench.awaited |= {"near", "far"}
    bench.run()
    assert [seconds for seconds, _ in bench.ended.values()] == [NUM_BLOCKS, NUM_BLOCKS]


def test_what_has_not_begun_can_be_dropped(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    bench.uploads.advance()
    bench.uploads.drop_waiting()
    assert bench.run() == NUM_BLOCKS * "a"
    assert list(bench.ended) == ["a"]
