"""The server as its container's environment uses it: health check and metrics, with the real commands and paths."""

from __future__ import annotations

import subprocess
import sys

import httpx
from deployment import health_command, read_yaml
from server_process import ServerProcess


def check_health(port: int) -> int:
    """The exit status of the image's health check for a server on `port`."""
    program = health_command()[-1].replace(":8000/", f":{port}/")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return done.returncode


def test_the_health_check_fails_without_a_server(server: ServerProcess, unused_tcp_port: int) -> None:
    assert check_health(httpx.URL(server.url).port or 0) == 0
    assert check_health(unused_tcp_port) == 1


def test_prometheus_finds_metrics(server: ServerProcess) -> None:
    (job,) = read_yaml("deploy/prometheus.yml")["scrape_configs"]
    answer = httpx.get(server.url + job["metrics_path"])
    assert answer.status_code == 200
    assert "stencil:num_requests_running" in answer.text
