"""compose.cluster.yaml agrees with the server, with Ray and with the machines that it starts."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
from deployment import read_yaml
from ray.scripts.scripts import start

from core.config import EngineConfig
from engine.cluster.engine_bundle import bundle_of
from engine.cluster.ray_cluster import machines_of
from entrypoints.serve import FLUSH_SECONDS
from entrypoints.serve_args import parse_options

PROCESS_SECONDS = 10.0


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("compose.cluster.yaml")["services"][name]
    return found


def script() -> list[str]:
    shell, flag, text, _ = service("stencil")["entrypoint"]
    assert (shell, flag) == ("sh", "-c")
    return shlex.split(text.replace("$$", "$"))


def ray_options(words: list[str]) -> dict[str, Any]:
    """What Ray makes of the words after `ray start`; it refuses what it does not know."""
    with start.make_context("start", words) as context:
        return dict(context.params)


def served() -> EngineConfig:
    words = script()
    begin = words.index("exec") + 1
    assert words[begin : begin + 3] == ["python", "-m", "entrypoints.serve"]
    assert words[-1] == "$@"
    options = parse_options([*words[begin + 3 : -1], *service("stencil")["command"]])
    assert options.host == "0.0.0.0"
    assert service("stencil")["ports"] == [f"127.0.0.1:{options.port}:{options.port}"]
    return options.config.engine


def test_the_first_machine_is_the_head_and_serves() -> None:
    words = script()
    assert words[:2] == ["ray", "start"]
    options = ray_options(words[2 : words.index("&&")])
    assert (options["head"], options["num_cpus"], options["num_gpus"]) == (True, 0, 0)
    assert not options["block"]
    engine = served()
    assert engine.follows_cluster
    assert engine.data_parallel_backend == "ray"


def test_the_other_machine_joins_it_and_has_room_for_two_engines() -> None:
    command, verb, *words = service("worker")["entrypoint"]
    assert (command, verb) == ("ray", "start")
    options = ray_options(words)
    assert options["block"]
    port = ray_options(script()[2 : script().index("&&")])["port"]
    assert options["address"] == f"stencil:{port}"
    node = {"NodeID": "1", "Alive": True, "NodeManagerAddress": "a", "Resources": {"CPU": options["num_cpus"]}}
    (machine,) = machines_of([node], (), bundle_of(served(), has_gpus=False)).values()
    assert machine.room == 2


def test_a_flag_that_ray_does_not_have_is_seen() -> None:
    with pytest.raises(click.NoSuchOption):
        ray_options(["--heads"])


def test_machines_have_the_same_image_cache_and_token() -> None:
    first, other = service("stencil"), service("worker")
    for name in ("image", "build", "volumes", "read_only", "cap_drop"):
        assert first[name] == other[name]
    assert first["build"]["args"] == {"EXTRAS": "ray"}
    shared = {name: value for name, value in other["environment"].items() if name.startswith("RAY_")}
    assert shared.items() <= first["environment"].items()
    assert shared["RAY_AUTH_MODE"] == "token"
    assert other["cap_drop"] == ["ALL"]
    assert shared["RAY_worker_niceness"] == "0", "without capabilities no engine can raise itself"


def test_the_server_is_given_time_to_drain() -> None:
    seconds = float(service("stencil")["stop_grace_period"].removesuffix("s"))
    assert seconds >= served().drain_seconds + FLUSH_SECONDS + PROCESS_SECONDS
