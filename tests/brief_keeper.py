"""A keeper of weights that keeps what dead workers had for a second only."""

from __future__ import annotations

from model_executor.weights import keeper, process


def main(config: bytes, fds: list[int]) -> None:
    """Entry point for `core.ipc.process.spawn`."""
    keeper.LINGER_SECONDS = 1.0
    process.main(config, fds)
