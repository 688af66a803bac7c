"""Two machines of a Ray cluster on 127.0.0.1, in a process of its own: Ray's Cluster replaces signal handlers.

Run as a script: prints the cluster's address, the head's GCS and raylet and each machine's raylet, adds a machine for
each line that it reads, and ends with its input. In a network namespace with `lo` alone, since Ray listens on more than
it is told.
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

SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # hosts cannot raise themselves in a namespace, and would wait for all other programs
    "RAY_AUTH_MODE": "token",
}
FOLDER_VARIABLE = "STENCIL_RAY_FOLDER"
"""Environment variable of all processes of a cluster: its folder."""
STORE_BYTES = 80 * 1024**2


class Machines:
    """The cluster, as who disturbs it sees it. raylets: of its machines, in the order in which they came. Not that of
    the head, which has no cores, and through which servers here are clients: `head_raylet`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._read()
        self.head, self.head_raylet = psutil.Process(int(self._read())), psutil.Process(int(self._read()))
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

    @property
    def hosts(self) -> list[psutil.Process]:
        """The processes of all machines that run a host of an engine, or are about to."""
        return [each for raylet in self.raylets for each in hosts_of(raylet)]


def hosts_of(raylet: psutil.Process) -> list[psutil.Process]:
    """As `Machines.hosts`, of one machine."""
    with suppress(psutil.NoSuchProcess):
        return [each for each in raylet.children() if _is_host(each)]
    return []


def _is_host(process: psutil.Process) -> bool:
    """Ray calls a process as what runs there."""
    with suppress(psutil.NoSuchProcess):
        return is_there(process) and "".join(process.cmdline()[:1]).startswith("ray::HostActor")
    return False


def is_there(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def machines(folder: Path, cores: int = 1, **variables: str) -> Iterator[Machines]:
    """A cluster that this process and its children may join, of which nothing is left afterwards. folder: for its
    files. cores: that each machine says it has. variables: of all processes of the cluster, beside this one's.
    """
    token = folder / "token"
    token.write_text("t" * 64)
    token.chmod(0o600)
    before = dict(os.environ)
    joining = QUIET | {"RAY_AUTH_TOKEN_PATH": str(token)}
    (folder / "ray").mkdir()  # Ray writes its address there, and takes /tmp/ray to exist if it is not told where
    own = {"RAY_TMPDIR": str(folder), FOLDER_VARIABLE: str(folder)}
    environment = {**os.environ, **variables, **joining, **own}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-P", __file__, str(cores)]
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            os.environ |= joining
            yield Machines(process)
        finally:
            for name in joining:
                os.environ.pop(name)
            os.environ |= {name: before[name] for name in joining if name in before}
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

    options: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    folder = os.environ[FOLDER_VARIABLE]
    head = {"num_cpus": 0, "_system_config": SETTINGS, "temp_dir": folder, **options}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    cores = int(sys.argv[1])

    def add() -> int:
        node = cluster.add_node(num_cpus=cores, **options)
        return int(node.all_processes["raylet"][0].process.pid)

    tell(cluster.address)
    for kind in ("gcs_server", "raylet"):
        tell(cluster.head_node.all_processes[kind][0].process.pid)
    for _ in range(2):
        tell(add())
    for _ in sys.stdin:
        tell(add())
    cluster.shutdown()
    time.sleep(0.1)


if __name__ == "__main__":
    main()
