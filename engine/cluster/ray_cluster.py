"""The Ray cluster that this process is a client of: joining it, and what it says of its machines."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

from core.errors import ConfigError, EngineDeadError
from core.routing.placement import Machine

# Ray would end this process, and with it the engines of this machine, a minute after the cluster's head is gone. It
# reads its settings when it is imported.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(365 * 24 * 3600))

import ray
from ray._private.state import state  # Ray says this nowhere else
from ray.exceptions import RayError

Result = TypeVar("Result")

ERRORS = RayError, OSError, ValueError, RuntimeError
"""What Ray raises where it cannot say anything of its cluster."""

NAMESPACE, LOOPBACK = "stencil", "127.0.0.1"

REACH_SECONDS = 5.0
"""How long to try whether anything listens at the cluster's address."""

_START = "start one with `ray start --head`, or name another by --ray-address"
_ALIKE = f"both need the same token (RAY_AUTH_MODE=token, docs/cluster.md) and Ray {ray.__version__}"

JOIN_SECONDS = 60.0
"""How long joining a cluster may take: less than a second where it is there, and no machine of it is busy."""


def join(address: str) -> None:
    """Make this process a client of the Ray cluster at this address. Raises ConfigError."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"no Ray cluster answers at {address} ({error}): {_START}") from error
    try:
        _within(JOIN_SECONDS, lambda: _connect(address))
        addresses = [str(node["NodeManagerAddress"]) for node in nodes_of_cluster()]
    except ERRORS as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise ConfigError(f"this machine is in no Ray cluster: {_START}") from error
        raise ConfigError(f"the Ray cluster at {address} cannot be joined ({error}): {_ALIKE}") from error
    check_authentication(addresses, lambda: _answers_without_token(ray.get_runtime_context().gcs_address))


def _connect(address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address.startswith(LOOPBACK):  # Ray would say which address this machine has in its network
        options["_node_ip_address"] = LOOPBACK
    ray.init(address=address, namespace=NAMESPACE, **options)


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Run what Ray may try for minutes. Raises its error, or TimeoutError."""
    try:
        in_thread(function).result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer in {seconds:g} s") from error


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run what may wait for Ray's head, for ever if that is gone, in a thread that keeps no process from ending."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # who waits no longer does not end it

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    Thread(target=run, name="ask-ray", daemon=True).start()
    return done


def check_membership() -> None:
    """Raises EngineDeadError if Ray's process on this machine has died, through which this one is a client: Ray has
    ended what this one had, and would never begin what it asks for now."""
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in nodes_of_cluster()):
        raise EngineDeadError("Ray's process on this machine has died: start it again (`ray start`), and this server")


def leave() -> None:
    """End being a client of the cluster, which ends what is still there of this process."""
    if ray.is_initialized():
        ray.shutdown()


def forget() -> None:
    """Be able to end without leaving a cluster whose head does not answer."""
    atexit.unregister(ray.shutdown)


def check_authentication(addresses: Iterable[str], answers_without_token: Callable[[], bool]) -> None:
    """Raises ConfigError for a cluster that whoever reaches its ports may run anything on. answers_without_token: asked
    only if the cluster is not on this machine alone.
    """
    if any(not each.startswith("127.") for each in addresses) and answers_without_token():
        raise ConfigError(
            "the Ray cluster asks for no token, so that whoever reaches its ports may run anything on it; start it and "
            "this server with RAY_AUTH_MODE=token (docs/cluster.md)"
        )


def _answers_without_token(address: str) -> bool:
    """Whether the cluster serves who has none. Asked by another process: Ray reads its settings once."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "status", "--address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    try:
        asked = subprocess.run(
            command, env=environment, timeout=JOIN_SECONDS, check=False, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        text = f"the Ray cluster at {address} did not say in {JOIN_SECONDS:g} s whether it asks for a token"
        raise ConfigError(f"{text}; see `ray status`") from error
    return "InvalidAuthToken" not in asked.stdout + asked.stderr


def restore_signal_handlers() -> None:
    """Take back what `ray.init` has done below Python: it would tell of each SIGTERM as if the process had crashed."""
    if current_thread() is main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def nodes_of_cluster() -> list[dict[str, Any]]:
    """What Ray knows of the cluster's machines."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def machines_of(
    nodes: Iterable[Mapping[str, Any]], draining: Collection[str], bundle: Mapping[str, float]
) -> dict[str, Machine]:
    """The living ones of these machines, by id. draining: ids of those that Ray is told will end. bundle: what an
    engine asks of a machine, which has room for as many as could have it, whatever others take of it now.
    """
    return {
        node["NodeID"]: Machine(
            str(node["NodeManagerAddress"]),
            min(int(node["Resources"].get(name, 0) // number) for name, number in bundle.items()),
            node["NodeID"] in draining,
        )
        for node in nodes
        if node["Alive"]
    }


def draining_nodes() -> Collection[str]:
    """Ids of the machines that Ray is told will end: by an autoscaler, or `ray drain-node`."""
    return set(state.get_draining_nodes())
