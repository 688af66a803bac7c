"""KeyReload: reads key files again on request while the server runs (SIGHUP)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.errors import ConfigError
from entrypoints.api_keys import KeySource
from entrypoints.openai.guards.key_ring import KeyRing

logger = logging.getLogger("stencil.api")


class KeyReload:
    """Replaces all keys of the ring, or none: if any file cannot be read or is refused, the old keys stay."""

    def __init__(self, source: KeySource, ring: KeyRing) -> None:
        self._source, self._files = source, ", ".join(source.files)
        self._ring = ring
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Request a reload. Requests during a reload cause one more reload after it."""
        self._asked.set()

    async def run(self) -> None:
        """Reload on each request, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._read()

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(_read_again, self._source)  # the disk may be slow
        except ConfigError as error:
            logger.error("the keys of %s stay as they are (%d): %s", self._files, len(self._ring), error)
            return
        self._ring.replace(keys)
        logger.info("%s: read again, %d keys", self._files, len(self._ring))


def _read_again(source: KeySource) -> tuple[str, ...]:
    """Raises ConfigError, also for a pipe such as a shell's ``<(...)``: opening it again would block for a writer."""
    for file in source.files:
        if Path(file).is_fifo():
            raise ConfigError(f"the key file {file} is a pipe, which can be read once")
    return source.read()
