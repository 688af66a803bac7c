"""Notes the tensors that a pass reads from caches. A CUDA graph reads them again whenever it is replayed, so whoever
captures one keeps them alive beyond their time in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_noting = threading.local()


def hold(x: Tensor) -> Tensor:
    """Return x, and note it if this thread is `holding`."""
    into: list[Tensor] | None = getattr(_noting, "into", None)
    if into is not None:
        into.append(x)
    return x


@contextmanager
def holding(into: list[Tensor]) -> Iterator[None]:
    """Have `hold` append what this thread passes to it to `into`, and not to the list of an outer `holding`."""
    before = getattr(_noting, "into", None)
    _noting.into = into
    try:
        yield
    finally:
        _noting.into = before
