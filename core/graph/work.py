"""Work: the size of a batch, from which the cost model predicts how long it takes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Work(msgspec.Struct, frozen=True):
    """The size of a batch, one entry per request and row."""

    queries: tuple[int, ...]  # computed tokens
    keys: tuple[int, ...]  # tokens that these attend to

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Work:
        """Work in which every token attends to all tokens of its own request."""
        queries = tuple(tokens)
        return cls(queries, queries)

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[int, int]]) -> Work:
        """Work of requests given as (queries, keys)."""
        pairs = tuple(pairs)
        return cls(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))

    def __add__(self, other: Work) -> Work:
        """Both in one batch."""
        return Work(self.queries + other.queries, self.keys + other.keys)
