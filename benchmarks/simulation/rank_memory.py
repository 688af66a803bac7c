"""RankMemory: the components that an engine's simulated ranks hold, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.handles import LoadedComponent, ModelKey
from core.messages.worker import Load


class RankMemory:
    """What the ranks have themselves, whatever the scheduler believes. All methods but `components` raise
    AssertionError for what a real rank could not do.
    """

    def __init__(self, num_ranks: int, sizes: Mapping[ModelKey, int], budget: int) -> None:
        """sizes: bytes of each component. budget: bytes for all components of a rank; 0: no limit."""
        self.version = 0  # of what batches may use
        self._sizes, self._budget = sizes, budget
        self._there: list[set[ModelKey]] = [set() for _ in range(num_ranks)]  # by rank: what batches may use
        self._coming: list[set[ModelKey]] = [set() for _ in range(num_ranks)]  # by rank: what it is loading

    def start(self, rank: int, keys: Iterable[ModelKey]) -> tuple[LoadedComponent, ...]:
        """Note a process that has started, with these components; returns them as it reports them."""
        self._there[rank], self._coming[rank] = set(keys), set()
        self.version += 1
        self._check_room(rank)
        return tuple(map(self.loaded, sorted(self._there[rank], key=_order)))

    def begin(self, rank: int, load: Load) -> None:
        """Drop what an order drops, and make room for what it loads. An order to several ranks may name what some of
        them have, or lack, already.
        """
        busy = self._coming[rank].intersection(load.drop)
        assert not busy, f"rank {rank} is to drop what it is loading: {busy}"
        self._there[rank].difference_update(load.drop)
        self.version += 1
        self._coming[rank].update(set(load.load) - self._there[rank])
        self._check_room(rank)

    def end(self, rank: int, key: ModelKey, *, is_loaded: bool) -> None:
        """Note the end of a load, successful or not."""
        self._coming[rank].discard(key)
        if is_loaded:
            self._there[rank].add(key)
            self.version += 1

    def check_has(self, rank: int, keys: Iterable[ModelKey], dropped: Iterable[ModelKey] = ()) -> None:
        """Check that a rank has these components, also without those that it is about to drop."""
        lacking = set(keys) - self._there[rank] | set(keys).intersection(dropped)
        assert not lacking, f"rank {rank} has no {sorted(map(str, lacking))} for a batch"

    def lose(self, rank: int) -> None:
        """Note a process that has died."""
        self._there[rank], self._coming[rank] = set(), set()
        self.version += 1

    def has(self, rank: int, keys: Iterable[ModelKey]) -> bool:
        """Whether a rank has these components."""
        return self._there[rank].issuperset(keys)

    def loaded(self, key: ModelKey) -> LoadedComponent:
        """A component, as a rank reports it."""
        return LoadedComponent(key, self._sizes[key])

    def _check_room(self, rank: int) -> None:
        nbytes = sum(self._sizes[key] for key in self._there[rank] | self._coming[rank])
        assert not self._budget or nbytes <= self._budget, f"rank {rank} holds {nbytes} bytes of {self._budget}"


def _order(key: ModelKey) -> tuple[str, str]:
    return key.content, key.component
