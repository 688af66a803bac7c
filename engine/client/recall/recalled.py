"""Recalled: what approximate caching did for one picture, as the answer to its request tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """By default nothing: every step was computed."""

    can_recall: bool = False  # whether it is a picture that may begin in a state
    source: str | None = None  # id of the request whose state it began in, of the same owner; None: of none
    source_index: int | None = None  # of the picture among those of that request
    similarity: float | None = None  # of the two prompts: cosine of their embeddings, rounded
    steps_skipped: int = 0
    is_kept: bool = False  # its own states are kept for later pictures
