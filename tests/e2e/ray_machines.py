"""Two machines of a Ray cluster on 127.0.0.1, in a process of its own: Ray's Cluster replaces signal handlers.

Run as a script: prints the cluster's address and each machine's raylet, adds a machine for each line that it reads, and
ends with its input. In a network namespace with `lo` alone, since Ray listens on more than it is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "token",
}
STORE_BYTES = 80 * 1024**2


class Machines:
    """The cluster, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._read()
        self.raylets = [psutil.Process(int(self._read())) for _ in range(2)]

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("told "):
                return line.removeprefix("told ").strip()
        raise AssertionError("the cluster has ended")

    def add(self) -> None:
        """One more machine."""
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self.raylets.append(psutil.Process(int(self._read())))


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """A cluster, of which nothing is left afterwards. folder: for its files."""
    token = folder / "token"
    token.write_text("t" * 64)
    token.chmod(0o600)
    environment = {**os.environ, **QUIET, "RAY_AUTH_TOKEN_PATH": str(token), "TEST_RAY_FOLDER": str(folder)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-P", __file__], env=environment, **pipes) as process:
        try:
            found = Machines(process)
            os.environ |= QUIET | {"RAY_AUTH_TOKEN_PATH": str(token)}
            yield found
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for each in family:  # agents outlive their raylets by a minute
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(family, timeout=10)
            process.kill()


def main() -> None:
    """The cluster's process."""
    from ray.cluster_utils import Cluster

    def tell(what: object) -> None:
        print("told", what, flush=True)

    options = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": STORE_BYTES}
    folder = os.environ["TEST_RAY_FOLDER"]
    head = {"num_cpus": 0, "_system_config": HEALTH, "temp_dir": folder, **options}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add() -> int:
        node = cluster.add_node(num_cpus=1, **options)
        return int(node.all_processes["raylet"][0].process.pid)

    tell(cluster.address)
    for _ in range(2):
        tell(add())
    for _ in sys.stdin:
        tell(add())
    cluster.shutdown()
    time.sleep(0.1)


if __name__ == "__main__":
    main()
