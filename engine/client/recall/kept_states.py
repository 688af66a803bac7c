"""KeptStates: the states that finished pictures have left, found by the similarity of their prompts. Bounded in bytes.

A *state* is the latents of a run after some of its steps. One run leaves several, so that a later one may skip as many
steps as its prompt's similarity allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from core.errors import OutOfMemoryError
from core.handles import NOWHERE, ArrayRef
from core.ipc.shared_array import carve
from engine.client.recall.run_key import RunKey
from engine.client.sessions.client_arena import ClientArena

Embedding = npt.NDArray[np.float32]
"""A prompt's embedding, float32 [width], of length 1."""

DIGITS = 4
"""Decimals of a similarity: products of more rows may sum in another order, which is not to decide."""


@dataclass(slots=True, eq=False)
class KeptRun:
    """What one run has left. Only KeptStates writes it."""

    # How it was made.
    key: RunKey
    seed: int
    request_id: str  # of the request that it was made for
    index: int  # of its picture among those of the request
    # Its memory.
    region: ArrayRef = NOWHERE  # all of its states
    states: Mapping[int, ArrayRef] = field(default_factory=dict)  # computed steps done -> state
    nbytes: int = 0  # that it counts with, its embedding included
    # Its use.
    usefulness: int = 0
    last_used: int = 0  # number of the last event at which it was used, for equal usefulness
    num_readers: int = 0  # requests that begin in one of its states, or may be run again so
    is_dropped: bool = False  # it is found no more, and freed with the last reader


class KeptStates:
    """One per AsyncEngine. Used on its event loop alone.

    The least useful runs are evicted first: those that were recalled least often. What was useful long ago counts less
    than what is useful now (LFU with dynamic ageing, Arlitt et al. 2000): a new run begins with the usefulness of the
    last one that was evicted.
    """

    def __init__(self, max_bytes: int, arena: ClientArena) -> None:
        """arena: where states are. max_bytes: that it and the embeddings take of all memory; 0: nothing is kept."""
        self.max_bytes = max_bytes
        self.used_bytes = 0  # of runs, those included that are not filled yet, and dropped ones that are still read
        self._arena = arena
        self._groups: dict[RunKey, _Group] = {}
        self._runs: dict[KeptRun, None] = {}
        self._age = 0  # usefulness of the last run that was evicted
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._runs)

    # ------------------------------------------------------------------------------------------------- keeping

    def reserve(self, run: KeptRun, steps: Sequence[int], shape: tuple[int, int], width: int) -> KeptRun | None:
        """A run with memory for its states, which others are evicted for. steps: computed ones done, at each state.
        shape: of a state: image tokens, latent width. width: of its embedding. None: there is no room for it, even
        without all runs that nobody reads.
        """
        size = prod(shape) * 4
        nbytes = len(steps) * size + 2 * 4 * width  # a group has at most twice as many rows as runs
        if not self._make_room(nbytes):
            return None
        try:
            run.region = self._arena.alloc(len(steps) * size)
        except OutOfMemoryError:
            return None
        run.states = {step: carve(run.region, place * size, shape, "float32") for place, step in enumerate(steps)}
        run.nbytes = nbytes
        self.used_bytes += nbytes
        return run

    def cancel(self, run: KeptRun) -> None:
        """Free the memory of a run that will not be filled."""
        self._release(run)

    def add(self, run: KeptRun, embedding: Embedding) -> None:
        """Keep a run that was reserved and is filled now."""
        self._runs[run] = None
        self._groups.setdefault(run.key, _Group(len(embedding))).add(run, embedding)
        self._note_use(run)

    # ------------------------------------------------------------------------------------------------- recalling

    def nearest(
        self, key: RunKey, embedding: Embedding, seed: int | None, others: Collection[KeptRun]
    ) -> tuple[KeptRun, float] | None:
        """The run of this key with the most similar prompt, and the similarity, -1..1. seed: of the noise that it must
        have begun with; None: any. others: runs that do not count. None: there is none.
        """
        group = self._groups.get(key)
        if group is None:
            return None
        for run, similarity in group.by_similarity(embedding):
            if seed in (None, run.seed) and run not in others:
                return run, round(similarity, DIGITS)
        return None

    def lend(self, run: KeptRun) -> None:
        """Note that a request begins in a state of a run, which stays until it is given back."""
        run.num_readers += 1
        self._note_use(run)

    def give_back(self, run: KeptRun) -> None:
        """Note that a request that a run was lent to has ended."""
        run.num_readers -= 1
        if run.is_dropped and not run.num_readers:
            self._release(run)

    # ------------------------------------------------------------------------------------------------- dropping

    def drop(self, model: str, content_id: str, cache_salt: str) -> None:
        """Forget all runs of a picture to edit."""
        meant = model, content_id, cache_salt
        for run in [run for run in self._runs if (run.key.model, run.key.content_id, run.key.cache_salt) == meant]:
            self._drop(run)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all records agree."""
        assert 0 <= self.used_bytes <= self.max_bytes, f"{self.used_bytes} of {self.max_bytes} bytes"
        assert sum(run.nbytes for run in self._runs) <= self.used_bytes
        assert {run for group in self._groups.values() for run in group.runs} == self._runs.keys()

    def _make_room(self, nbytes: int) -> bool:
        idle = {run for run in self._runs if not run.num_readers}
        if self.used_bytes - sum(run.nbytes for run in idle) + nbytes > self.max_bytes:
            return False
        while self.used_bytes + nbytes > self.max_bytes:
            least = min(idle, key=lambda run: (run.usefulness, run.last_used))
            idle.remove(least)
            self._age = least.usefulness
            self._drop(least)
        return True

    def _drop(self, run: KeptRun) -> None:
        del self._runs[run]
        group = self._groups[run.key]
        group.remove(run)
        if not group.runs:
            del self._groups[run.key]
        run.is_dropped = True
        if not run.num_readers:
            self._release(run)

    def _release(self, run: KeptRun) -> None:
        self.used_bytes -= run.nbytes
        self._arena.free(run.region)

    def _note_use(self, run: KeptRun) -> None:
        self._num_events += 1
        run.last_used = self._num_events
        run.usefulness = max(run.usefulness, self._age) + 1


@dataclass(slots=True)
class _Group:
    """Runs with one key. Row i of the matrix is the embedding of run i; it has at most twice as many rows."""

    width: int
    runs: list[KeptRun] = field(default_factory=list)
    _matrix: Embedding = field(init=False)

    def __post_init__(self) -> None:
        self._matrix = np.empty((1, self.width), np.float32)

    def add(self, run: KeptRun, embedding: Embedding) -> None:
        number = len(self.runs)
        if number == len(self._matrix):
            self._resize(2 * number)
        self._matrix[number] = embedding
        self.runs.append(run)

    def remove(self, run: KeptRun) -> None:
        """The last row takes its place."""
        place, last = self.runs.index(run), len(self.runs) - 1
        self._matrix[place] = self._matrix[last]
        self.runs[place] = self.runs[last]
        self.runs.pop()
        if 4 * len(self.runs) <= len(self._matrix):
            self._resize(max(1, 2 * len(self.runs)))

    def by_similarity(self, embedding: Embedding) -> list[tuple[KeptRun, float]]:
        """Its runs with their prompts' similarity to another one, the most similar first; of equal ones the newest."""
        similarities = self._matrix[: len(self.runs)] @ embedding
        order = np.lexsort(([-run.last_used for run in self.runs], -similarities))
        return [(self.runs[number], float(similarities[number])) for number in order]

    def _resize(self, rows: int) -> None:
        kept = self._matrix[: len(self.runs)]
        self._matrix = np.empty((rows, self.width), np.float32)
        self._matrix[: len(kept)] = kept
