"""Measures steps that several ranks compute together: by degree, size of the picture, and computed tokens.

The ranks are processes that load the model and meet in a group, as an engine's workers do. All make the same batches;
the first one's clock counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from core.config import ModelConfig
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.models.base import Family
from model_executor.parallel.group import Group
from model_executor.parallel.groups import Groups
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.probes.cost_probe import Batches
from model_executor.worker.probes.timing import median_seconds

ROWS = (1, 2)
"""Of the batches: a request's, without and with classifier-free guidance."""

GROUP_SECONDS = 600.0
"""How long a rank waits for another one: it may still load, or compute a step alone."""


def joint_samples(config: ModelConfig, degrees: Sequence[int], threads: int) -> list[CostSample]:
    """Measure steps of a model at these degrees, above 1. threads: of each rank. Raises RuntimeError if a rank ends
    early."""
    processes = get_context("spawn")
    pipes = [processes.Pipe() for _ in range(max(degrees))]
    settings = config, tuple(degrees), threads
    ranks = [
        processes.Process(target=_run, args=(rank, theirs, *settings), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        ports = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(ports)
        samples: list[CostSample] = pipes[0][0].recv()
    except EOFError as error:
        raise RuntimeError("a rank has ended before all steps were measured; its output says why") from error
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in ranks:
            process.join()
    return samples


def _run(rank: int, pipe: Connection, config: ModelConfig, degrees: Sequence[int], threads: int) -> None:
    """Entry point of a rank's process."""
    quiet_libraries()
    set_threads(threads)
    models = ResidentModels.open((config,), device_index=rank, num_workers=max(degrees))
    models.load_all()
    groups = Groups(rank, GROUP_SECONDS, models.device)
    pipe.send(groups.port)
    ports: list[int] = pipe.recv()
    samples = list[CostSample]()
    for degree in degrees:
        ranks = tuple(range(degree))
        if rank in ranks:
            group = groups.of(ranks, 0, ports[0])
            for info in models.ready(rank).models:
                if not info.parent:
                    samples += profile_steps(models.families[info.name], info, group)
    if rank == 0:
        pipe.send(samples)


@torch.inference_mode()
def profile_steps(family: Family, info: ModelInfo, group: Group) -> list[CostSample]:
    """Measure steps of a group, all of whose ranks call this."""
    steps = Batches(family, info, group).steps(ROWS)
    return [
        CostSample(info.name, op.cost_name, work, median_seconds(run), True, group.degree) for op, work, run in steps
    ]
