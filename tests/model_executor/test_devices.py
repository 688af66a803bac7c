"""The GPU that each worker uses, for any number of GPUs."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from core.errors import ConfigError
from model_executor.devices import pick_device, resolve_device


@pytest.mark.parametrize(("engines", "workers"), [(1, 1), (4, 1), (1, 3), (3, 2)])
def test_workers_of_all_engines_have_a_gpu_each(engines: int, workers: int) -> None:
    taken = []
    for engine in range(engines):
        config = EngineConfig(data_parallel_size=engines, data_parallel_rank=engine, workers_per_engine=workers)
        assert config.num_workers == engines * workers
        indices = [config.device_index(rank) for rank in range(workers)]
        assert indices == list(range(engine * workers, (engine + 1) * workers))
        taken += [pick_device("cuda", index, config.num_workers, 8, None) for index in indices]
    assert taken == [f"cuda:{number}" for number in range(engines * workers)]


def test_auto_takes_a_gpu_if_there_is_one() -> None:
    assert pick_device("auto", 1, 2, 0, None) == "cpu"
    assert pick_device("auto", 1, 2, 2, None) == "cuda:1"
    assert pick_device("cpu", 3, 4, 2, None) == "cpu"


def test_a_named_device_is_taken_by_every_worker() -> None:
    assert pick_device("cuda:1", 0, 1, 2, None) == "cuda:1"


@pytest.mark.parametrize("index", [0, 3])
def test_too_few_gpus_are_an_error_of_the_first_worker_too(index: int) -> None:
    with pytest.raises(ConfigError, match="4 workers need a GPU each, but PyTorch sees 2 GPUs"):
        pick_device("auto", index, 4, 2, None)


@pytest.mark.parametrize(
    ("name", "num_gpus", "visible", "message"),
    [
        ("cuda", 0, None, "device cuda was asked for, but PyTorch sees no GPU; use --device cpu"),
        ("cuda", 0, "", r"sees no GPU \(CUDA_VISIBLE_DEVICES=''\)"),
        ("cuda:2", 2, "4,6", r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES='4,6'\), the last of which is cuda:1"),
        ("cuda:1", 1, None, "sees one GPU, the last of which is cuda:0"),
        ("gpu", 1, None, "unknown device 'gpu'"),
        ("mps", 0, None, "unknown device 'mps'; use auto, cpu, cuda or cuda:N"),
        ("xpu:1", 1, None, "unknown device 'xpu:1'"),
        ("meta", 1, None, "unknown device 'meta'"),
    ],
)
def test_missing_devices_are_refused(name: str, num_gpus: int, visible: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick_device(name, 0, 1, num_gpus, visible)


def test_this_machine() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert str(resolve_device("auto")) in ("cpu", "cuda:0")
