"""The container image and compose.yaml agree with the project: paths, ports, users, times."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from deployment import (
    DOCKERFILE,
    GPU_DOCKERFILE,
    ROOT,
    find,
    health_command,
    image_environment,
    mounts,
    read_dockerfile,
    read_yaml,
    services,
)
from packaging.specifiers import SpecifierSet

from core.cache_folder import user_cache_folder
from entrypoints.api_keys import KEY_VARIABLE
from entrypoints.serve import FLUSH_SECONDS, bind, hosts_served
from entrypoints.serve_args import parse_options
from entrypoints.serve_options import ServeOptions

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROCESS_SECONDS = 10.0  # to end processes that did not leave by themselves


def copied_paths() -> set[str]:
    """The paths that the Dockerfile copies from the repository."""
    return {source for copy in find("COPY") if "from" not in copy.flags for source in copy.words[:-1]}


def served() -> ServeOptions:
    """The server options that result from the image's entry point and compose.yaml's flags."""
    (entrypoint,) = find("ENTRYPOINT")
    interpreter, flag, module, *flags = entrypoint.words
    assert (interpreter, flag, module) == ("python", "-m", "entrypoints.serve")
    return parse_options([*flags, *services()["stencil"].get("command", [])])


def test_a_key_is_asked_for_where_the_host_has_one_and_else_none() -> None:
    """An empty key would keep the server from starting; a variable without a value is passed on only if it is set."""
    environment = services()["stencil"]["environment"]
    assert environment == {KEY_VARIABLE: None}


def test_it_answers_for_prometheus_and_for_no_other_name() -> None:
    options = served()
    (job,) = read_yaml("deploy/prometheus.yml")["scrape_configs"]
    (target,) = (target for config in job["static_configs"] for target in config["targets"])
    with bind(options.host, 0) as listener:
        assert hosts_served(options, listener) == (options.host, target.partition(":")[0])


def test_every_copied_path_exists() -> None:
    assert [path for path in copied_paths() if not (ROOT / path).exists()] == []


def test_the_build_is_sent_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied_paths()


def test_all_that_the_wheel_is_made_of_is_copied() -> None:
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    texts = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert copied_paths() == packages | texts


def test_the_base_image_has_a_python_that_the_project_supports() -> None:
    version = next(arg.arguments for arg in find("ARG") if arg.arguments.startswith("PYTHON_VERSION="))
    minor = version.partition("=")[2]
    assert minor in SpecifierSet(PROJECT["project"]["requires-python"])
    assert f"Programming Language :: Python :: {minor}" in PROJECT["project"]["classifiers"]


@pytest.mark.parametrize("extra", ["", "ray"])
def test_torch_is_told_apart_from_all_other_requirements(tmp_path: Path, extra: str) -> None:
    """Runs the Dockerfile's own command."""
    (split,) = [run for run in find("RUN") if "tomllib" in run.arguments]
    command = split.arguments.replace("python -c", f"{sys.executable} -c", 1)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=os.environ | {"EXTRAS": extra}, check=True)
    torch, other = ((tmp_path / name).read_text().splitlines() for name in ("torch.txt", "other.txt"))
    (pin,) = torch
    extras = PROJECT["project"]["optional-dependencies"].get(extra, [])
    (wanted,) = {*PROJECT["project"]["dependencies"], *extras} - set(other)
    assert re.split("[<>=]", wanted)[0] == "torch"
    assert pin.removeprefix("torch==") in SpecifierSet(wanted.removeprefix("torch"))
    assert set(other) < {*PROJECT["project"]["dependencies"], *extras}


def test_all_that_is_installed_is_pinned() -> None:
    """PyTorch by its own list, since its index does not have all versions of other packages."""
    installs = [run.arguments for run in find("RUN") if "--requirement" in run.arguments]
    assert [("--constraint" in line, "torch.txt" in line) for line in installs] == [(False, True), (True, False)]


@pytest.mark.parametrize("file", [DOCKERFILE, GPU_DOCKERFILE], ids=lambda file: file.name)
def test_the_server_has_a_compiler_for_its_kernels(file: Path) -> None:
    """In the last stage, as it compiles for the CPU that it runs on, with the headers that the kernels include. The
    library goes to the cache: a tmpfs on /tmp would not let it be executed.
    """
    last = read_dockerfile(file)[-1].stage
    installs = [
        each.arguments for each in find("RUN", file) if "apt-get install" in each.arguments and each.stage == last
    ]
    (packages,) = (set(each.partition("apt-get install")[2].partition("&&")[0].split()) for each in installs)
    assert {"gcc", "libc6-dev"} <= packages
    sources = [path.read_text() for path in (ROOT / "model_executor/kernels").glob("*.[ch]")]
    included = {name for text in sources for name in re.findall(r"#include <([\w./]+)>", text)}
    assert included
    assert included <= {
        "immintrin.h",
        "math.h",
        "stddef.h",
        "stdint.h",
        "stdlib.h",
        "string.h",
        "sys/syscall.h",
        "unistd.h",
    }, "of gcc and libc alone"


def test_the_image_for_gpus_differs_in_what_gpus_need() -> None:
    """So that a change of one is made in both."""
    ours, gpus = (set(map(str, read_dockerfile(file))) for file in (DOCKERFILE, GPU_DOCKERFILE))
    differing = sorted(re.findall(r"name='(\w+)'.*arguments='([^ '=]*)", line)[0] for line in ours ^ gpus)
    names = [("ARG", "PYTHON_VERSION"), ("ARG", "TORCH_INDEX"), ("ENV", "PATH"), ("HEALTHCHECK", "CMD")]
    assert differing == sorted(names * 2)
    (index,) = (arg.arguments for arg in find("ARG", GPU_DOCKERFILE) if arg.arguments.startswith("TORCH_INDEX="))
    assert re.fullmatch(r"TORCH_INDEX=https://download\.pytorch\.org/whl/cu\d+", index)


def test_code_is_copied_after_everything_is_installed() -> None:
    """Otherwise a change of code would install PyTorch again."""
    instructions = read_dockerfile()
    own = [each for each in instructions if each.stage == instructions[-1].stage and each.name in ("RUN", "COPY")]
    assert own[-1].flags["from"] == "packages"
    assert own[-1].words[-1] == image_environment()["PYTHONPATH"]


def test_the_server_listens_where_the_image_says() -> None:
    options = served()
    (expose,) = find("EXPOSE")
    assert options.host == "0.0.0.0"
    assert expose.words == [str(options.port)]
    assert f"http://127.0.0.1:{options.port}/health" in health_command()[-1]


def test_the_server_is_a_numbered_user_without_rights() -> None:
    """Kubernetes' runAsNonRoot accepts only a numeric user."""
    (user,) = find("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.arguments)


def test_what_users_should_keep_lies_in_the_volume() -> None:
    (name, target), *others = (volume.split(":") for volume in services()["stencil"]["volumes"])
    assert not others
    assert name in read_yaml("compose.yaml")["volumes"]
    assert PurePosixPath(target) == user_cache_folder(image_environment()).parent


def test_the_container_is_given_time_to_drain() -> None:
    seconds = float(services()["stencil"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= served().config.engine.drain_seconds + FLUSH_SECONDS + PROCESS_SECONDS


def test_ports_are_published_to_this_host_alone() -> None:
    for name, port in (("stencil", served().port), ("prometheus", 9090), ("grafana", 3000)):
        assert services()[name]["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_every_mounted_file_exists(service: str) -> None:
    assert [source for source in mounts(service).values() if not (ROOT / source).is_file()] == []


def test_prometheus_asks_the_server() -> None:
    assert "/etc/prometheus/prometheus.yml" in mounts("prometheus")
    (job,) = read_yaml("deploy/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"stencil:{served().port}"]}]


def test_grafana_asks_prometheus() -> None:
    (source,) = read_yaml(mounts("grafana")["/etc/grafana/provisioning/datasources/stencil.yml"])["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == read_yaml("deploy/prometheus.yml")["global"]["scrape_interval"]


def test_grafana_finds_the_dashboard() -> None:
    (provider,) = read_yaml(mounts("grafana")["/etc/grafana/provisioning/dashboards/stencil.yml"])["providers"]
    path = f"{provider['options']['path']}/stencil.json"
    assert mounts("grafana")[path] == "./docs/grafana/stencil.json"
    assert services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == path


def datasources(node: object) -> set[str]:
    """Every data source that a dashboard's panels and variables name, by uid."""
    if isinstance(node, list):
        return set().union(*map(datasources, node))
    if not isinstance(node, dict):
        return set()
    named = node.get("datasource")
    here = {named["uid"]} if isinstance(named, dict) and "uid" in named else set()
    return here.union(*map(datasources, node.values()))


def test_the_dashboard_names_data_sources_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs/grafana/stencil.json").read_text())
    variables = {f"${{{each['name']}}}" for each in dashboard["templating"]["list"] if each["type"] == "datasource"}
    provisioned = {each["uid"] for each in read_yaml("deploy/grafana/datasources.yml")["datasources"]}
    grafana_itself = {"grafana", "-- Grafana --"}  # annotations
    used = datasources(dashboard)
    assert used
    assert used <= variables | provisioned | grafana_itself
