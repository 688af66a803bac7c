"""KeptStates: the states that finished pictures have left, found by the similarity of their prompts. Bounded in bytes.

A *state* is the latents of a run after some of its steps. One run leaves several, so that a later one may skip as many
steps as its prompt's similarity allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from mmap import PAGESIZE

import numpy as np
import numpy.typing as npt

from core.errors import OutOfMemoryError
from core.free_list import round_up
from core.handles import NOWHERE, ArrayRef
from core.ipc.shared_array import carve
from engine.client.recall.run_key import RunKey
from engine.client.sessions.client_arena import ClientArena

Embedding = npt.NDArray[np.float32]
"""A prompt's embedding, float32 [width], of length 1."""

DIGITS = 5
"""Decimals of a similarity: products of more rows may sum in another order, which is not to decide."""

MOST_PROMPTS = 64
"""Prompts that a run remembers. When it has these, it is no source of pictures without a seed any more."""


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
    last_used: int = 0  # number of the last use, among those of all runs
    prompts: set[int] = field(default_factory=set)  # hashes of those whose pictures have had its noise
    place: int = 0  # its row in its group
    num_readers: int = 0  # requests that begin in one of its states, or may be run again so
    is_dropped: bool = False  # it is found no more, and freed with the last reader

    def note_prompt(self, prompt: str) -> None:
        if len(self.prompts) < MOST_PROMPTS:
            self.prompts.add(hash(prompt))

    def makes_new(self, prompt: str) -> bool:
        """Whether a picture of the prompt would be another one than all before it."""
        return len(self.prompts) < MOST_PROMPTS and hash(prompt) not in self.prompts


class KeptStates:
    """One per AsyncEngine. Used on its event loop alone.

    The least useful runs are evicted first: those that were recalled least often. What was useful long ago counts less
    than what is useful now (LFU with dynamic ageing, Arlitt et al. 2000): a new run begins with the usefulness of the
    last one that was evicted.
    """

    def __init__(self, max_bytes: int, arena: ClientArena) -> None:
        """arena: where states are. max_bytes: that it and the embeddings take of all memory; 0: nothing is kept."""
        self.max_bytes = max_bytes
        self.num_recalled = 0  # pictures that began in a state
        self.used_bytes = 0  # of runs, those included that are not filled yet, and dropped ones that are still read
        self._arena = arena
        self._groups: dict[RunKey, _Group] = {}
        self._runs: dict[KeptRun, None] = {}
        self._kept_bytes = 0  # of these
        self._lent_bytes = 0  # of those of them that are read
        # A heap of (usefulness, last_used, number of the entry, run), of former uses, too.
        self._order: list[tuple[int, int, int, KeptRun]] = []
        self._entries = count()
        self._age = 0  # usefulness of the last run that was evicted
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._runs)

    # ------------------------------------------------------------------------------------------------- keeping

    def reserve(self, run: KeptRun, steps: Sequence[int], shape: tuple[int, int], width: int) -> KeptRun | None:
        """A run with memory for its states, which others are evicted for. steps: computed ones done, at each state.
        shape: of a state: image tokens, latent width. width: of its embedding. None: there is no room for it, even
        without all runs that nobody reads.
        """
        size = prod(shape) * 4
        nbytes = round_up(len(steps) * size, PAGESIZE) + 2 * (4 * width + 8)  # a group has at most twice as many rows
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

    def add(self, run: KeptRun, embedding: Embedding, prompt: str) -> None:
        """Keep a run that was reserved and is filled now."""
        run.note_prompt(prompt)
        self._runs[run] = None
        self._kept_bytes += run.nbytes
        self._groups.setdefault(run.key, _Group(len(embedding))).add(run, embedding)
        self._note_use(run)

    # ------------------------------------------------------------------------------------------------- recalling

    def nearest(self, key: RunKey, embedding: Embedding, prompt: str, seed: int | None) -> tuple[KeptRun, float] | None:
        """The run of this key with the most similar prompt, and the similarity, -1..1. seed: of the noise that it must
        have begun with; None: any of which there is no picture of this prompt yet. None: there is none.
        """
        if (group := self._groups.get(key)) is None:
            return None
        found = group.nearest(embedding, prompt, seed)
        return None if found is None else (found[0], round(found[1], DIGITS))

    def lend(self, run: KeptRun, prompt: str) -> None:
        """Note that a request of this prompt begins in a state of a run, which stays until it is given back."""
        self.num_recalled += 1
        run.note_prompt(prompt)
        run.num_readers += 1
        if run.num_readers == 1:
            self._lent_bytes += run.nbytes
        self._note_use(run)

    def give_back(self, run: KeptRun) -> None:
        """Note that a request that a run was lent to has ended."""
        run.num_readers -= 1
        if run.num_readers:
            return
        if run.is_dropped:
            self._release(run)
        else:
            self._lent_bytes -= run.nbytes
            self._push(run)

    # ------------------------------------------------------------------------------------------------- dropping

    def drop(self, model: str, content_id: str, cache_salt: str) -> None:
        """Forget all runs of a picture to edit. cache_salt: of its pages, see `CacheConfig.salt`; "": of all owners."""
        meant = [run for run in self._runs if (run.key.model, run.key.content_id) == (model, content_id)]
        for run in meant:
            if cache_salt in ("", run.key.owner):
                self._drop(run)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all records agree."""
        assert 0 <= self.used_bytes <= self.max_bytes, f"{self.used_bytes} of {self.max_bytes} bytes"
        assert sum(run.nbytes for run in self._runs) == self._kept_bytes <= self.used_bytes
        assert sum(run.nbytes for run in self._runs if run.num_readers) == self._lent_bytes
        assert {run for *_, run in self._order} >= {run for run in self._runs if not run.num_readers}
        assert all(group.runs[run.place] is run for group in self._groups.values() for run in group.runs)
        assert {run for group in self._groups.values() for run in group.runs} == self._runs.keys()

    def _make_room(self, nbytes: int) -> bool:
        idle = self._kept_bytes - self._lent_bytes
        if self.used_bytes - idle + nbytes > self.max_bytes:
            return False
        while self.used_bytes + nbytes > self.max_bytes:
            usefulness, last_used, _, least = heapq.heappop(self._order)
            if not (least.is_dropped or least.num_readers) and last_used == least.last_used:
                self._age = usefulness
                self._drop(least)
        return True

    def _drop(self, run: KeptRun) -> None:
        del self._runs[run]
        self._kept_bytes -= run.nbytes
        if run.num_readers:
            self._lent_bytes -= run.nbytes
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
        self._num_uses += 1
        run.last_used = self._num_uses
        run.usefulness = max(run.usefulness, self._age) + 1
        self._push(run)

    def _push(self, run: KeptRun) -> None:
        heapq.heappush(self._order, (run.usefulness, run.last_used, next(self._entries), run))
        if len(self._order) > 2 * len(self._runs) + 64:
            self._order = [(each.usefulness, each.last_used, next(self._entries), each) for each in self._runs]
            heapq.heapify(self._order)


class _Group:
    """Runs with one key. Row i of its arrays, which have at most twice as many rows, is of run i."""

    def __init__(self, width: int) -> None:
        self.runs: list[KeptRun] = []
        self._embeddings: Embedding = np.empty((1, width), np.float32)
        self._seeds = np.empty(1, np.int64)

    def add(self, run: KeptRun, embedding: Embedding) -> None:
        run.place = len(self.runs)
        if run.place == len(self._seeds):
            self._resize(2 * run.place)
        self._embeddings[run.place], self._seeds[run.place] = embedding, run.seed
        self.runs.append(run)

    def remove(self, run: KeptRun) -> None:
        """The last row takes its place."""
        last = self.runs.pop()
        if last is not run:
            self.runs[run.place] = last
            self._embeddings[run.place], self._seeds[run.place] = self._embeddings[last.place], last.seed
            last.place = run.place
        if 4 * len(self.runs) <= len(self._seeds):
            self._resize(max(1, 2 * len(self.runs)))

    def nearest(self, embedding: Embedding, prompt: str, seed: int | None) -> tuple[KeptRun, float] | None:
        """The run with the most similar prompt, of equal ones the last used, and the similarity. prompt, seed: see
        KeptStates. None: there is none."""
        number = len(self.runs)
        places = np.arange(number) if seed is None else np.flatnonzero(self._seeds[:number] == seed)
        rows = self._embeddings[:number] if seed is None else self._embeddings[places]  # few have it
        similarities = rows @ embedding
        while (most := float(similarities.max(initial=-np.inf))) > -np.inf:  # an embedding that is no number ends it
            nearest = similarities == most
            runs = [self.runs[place] for place in places[nearest].tolist()]
            if able := [run for run in runs if seed is not None or run.makes_new(prompt)]:
                return max(able, key=lambda run: run.last_used), most
            similarities[nearest] = -np.inf
        return None

    def _resize(self, rows: int) -> None:
        number = len(self.runs)
        embeddings, seeds = self._embeddings[:number], self._seeds[:number]
        self._embeddings, self._seeds = np.empty((rows, embeddings.shape[1]), np.float32), np.empty(rows, np.int64)
        self._embeddings[:number], self._seeds[:number] = embeddings, seeds
