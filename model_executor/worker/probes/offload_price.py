"""Measures what it costs that weights lie in host memory, and logs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from core.ipc.logs import of_request
from model_executor.device_failures import wait_for_device
from model_executor.host_weights import Weights
from model_executor.models.base import Family
from model_executor.worker.probes.timing import median_seconds

logger = logging.getLogger("stencil.worker")


def log_offload_price(families: Mapping[str, Family]) -> None:
    """Log in one line which weights lie in host memory, and how long the device waits for them at each use; nothing
    without any. families: of the models that are loaded, by name."""
    prices = [
        _price(f"{component} of {name}", weights)
        for name, family in families.items()
        for component in family.components
        if (weights := family.weights(component)).nbytes
    ]
    if prices:
        text = "--offload host: weights in host memory, and how long each use copies them to the device: %s"
        logger.info(text, ", ".join(prices), extra=of_request(""))


def _price(what: str, weights: Weights) -> str:
    def use() -> None:
        with weights.on_device():
            wait_for_device()

    return f"{what} {weights.nbytes / 1024**3:.2f} GiB in {1e3 * median_seconds(use):.1f} ms"
