"""What an engine asks of a machine of a cluster, and what it gets there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from core.config import EngineConfig


def bundle_of(config: EngineConfig, *, has_gpus: bool) -> dict[str, float]:
    """What an engine asks of a machine: a GPU for each worker, or as many cores as its workers have threads. has_gpus:
    whether the cluster has any.
    """
    model, workers = config.models[0], config.workers_per_engine
    if model.device.startswith("cuda") or (model.device == "auto" and has_gpus):
        return {"CPU": 1, "GPU": workers}
    return {"CPU": workers * max(1, model.threads or 1)}


def at_machine(config: EngineConfig, bundle: Mapping[str, float], resources: Mapping[str, float]) -> EngineConfig:
    """An engine's configuration on its machine. resources: all that the machine has. It shares the cores with as many
    engines as have room there, and sees no GPUs but its own.
    """
    size = 1 if "GPU" in bundle else max(1, int(resources.get("CPU", 1) // bundle["CPU"]))
    return msgspec.structs.replace(config, local_size=size, keeper="", launcher="")
