"""What is asked of a Ray cluster, and which clusters are refused."""

from __future__ import annotations

import pytest

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from engine.cluster.ray_backend import bundle_of, check_authentication


@pytest.mark.parametrize(
    ("device", "threads", "workers", "has_gpus", "bundle"),
    [
        ("cpu", 0, 1, True, {"CPU": 1}),
        ("cpu", 4, 2, False, {"CPU": 8}),
        ("auto", 0, 2, False, {"CPU": 2}),
        ("auto", 0, 2, True, {"CPU": 1, "GPU": 2}),
        ("cuda", 0, 1, False, {"CPU": 1, "GPU": 1}),
    ],
)
def test_what_an_engine_asks_of_a_machine(
    device: str, threads: int, workers: int, has_gpus: bool, bundle: dict[str, float]
) -> None:
    config = EngineConfig(models=(ModelConfig(device=device, threads=threads),), workers_per_engine=workers)
    assert bundle_of(config, has_gpus=has_gpus) == bundle


def test_a_cluster_without_a_token_is_refused_beyond_loopback() -> None:
    check_authentication(["127.0.0.1", "127.0.0.1"], {})
    check_authentication(["10.0.0.1", "127.0.0.1"], {"RAY_AUTH_MODE": "token"})
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        check_authentication(["10.0.0.1", "127.0.0.1"], {})
