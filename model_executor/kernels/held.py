"""Notes which cached tensors a pass reads: a CUDA graph reads them again at every replay, so it must keep them
alive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_local = threading.local()


def hold(x: Tensor) -> Tensor:
    """Return x, which comes out of a cache, and note it if a capture is under way in this thread."""
    noted: list[Tensor] | None = getattr(_local, "noted", None)
    if noted is not None:
        noted.append(x)
    return x


@contextmanager
def holding(into: list[Tensor]) -> Iterator[None]:
    """Have `hold` append to this list, in this thread, until the body ends; then to an outer `holding`'s again."""
    before = getattr(_local, "noted", None)
    _local.noted = into
    try:
        yield
    finally:
        _local.noted = before
