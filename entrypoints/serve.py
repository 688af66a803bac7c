"""``python -m entrypoints.serve``: the API server, which starts all other processes.

The port is bound before any process is started but the launcher of workers, and /health answers while the model loads.
On SIGTERM or Ctrl-C, running edits may finish within ``--drain-seconds``; a second signal ends them at once; all child
processes end before this one. SIGHUP reloads the key files; without key files it acts like SIGTERM.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Before the imports, which take seconds: as process 1 of a container, only signals with a handler are delivered. It
    # only takes note, as an exception could leave a module of C half imported.
    TERMINATED = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: TERMINATED.append(number))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # would end the process; key files are read later anyway
        signal.signal(signal.SIGHUP, lambda *_: None)

    from entrypoints.early_launch import launch_early

    OPTIONS = launch_early()

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI

from core.errors import ConfigError, StencilError
from core.ipc import logs
from core.ipc.heap import return_freed_memory
from engine.client.async_engine import AsyncEngine
from engine.observability.tracing import Tracer, create_tracer
from entrypoints.api_keys import KeySource
from entrypoints.early_launch import launched
from entrypoints.hosts import is_loopback, normal_host
from entrypoints.http_protocol import GuardedProtocol
from entrypoints.key_reload import KeyReload
from entrypoints.model_paths import check_model
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.body.chunks import STALL_SECONDS
from entrypoints.openai.fields.default_fields import check_defaults
from entrypoints.openai.fields.own_fields import check_inputs
from entrypoints.run_until import run_until
from entrypoints.serve_options import ServeOptions
from entrypoints.websocket_protocol import MAX_MESSAGE_BYTES, PING_SECONDS, WebSocketProtocol
from entrypoints.workflows.comfy.graph_file import GraphFile, is_graph
from entrypoints.workflows.comfy.served_graph import with_graphs
from entrypoints.workflows.workflow_files import read_workflows

FLUSH_SECONDS = 5  # for answers still being sent when the engine has stopped
KEEP_ALIVE_SECONDS = 75  # for idle connections; longer than clients' connection pools keep them
_STARTED = time.monotonic()


def main(options: ServeOptions) -> int:
    """Run the server. Exit status: 0 after a signal; 1 after a failure, printed as one line on stderr; 130 after Ctrl-C
    before the signal handlers are installed.
    """
    return_freed_memory()
    try:
        for model in options.models:
            check_model(model.model)
        options = with_workflows(options)
        with (
            contextlib.closing(create_tracer(options.config.engine.otlp_traces_endpoint, "api")) as tracer,
            bind(options.host, options.port) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_serve(options, listener, tracer))
    except StencilError as error:
        print(f"stencil: error: {logs.one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the handlers are installed
        return 130


def with_workflows(options: ServeOptions) -> ServeOptions:
    """The options with the workflows of the files that they name, and a model for each ComfyUI graph. Raises
    WorkflowError, also for an input that requests cannot give.
    """
    registered = read_workflows(options.workflow_files)
    check_inputs(registered.workflows)
    for workflow in registered.workflows:
        check_defaults(workflow)
    engine = msgspec.structs.replace(options.config.engine, classes=registered.classes, workflows=registered.workflows)
    engine = with_graphs(engine, [GraphFile.read(Path(each)) for each in options.workflow_files if is_graph(each)])
    return replace(options, config=msgspec.structs.replace(options.config, engine=engine))


@dataclass(frozen=True)
class _Signals:
    """State of shutdown by signals: the first one starts a graceful shutdown, the second one forces it."""

    asked: asyncio.Event
    forced: asyncio.Event

    def on_signal(self) -> None:
        (self.forced if self.asked.is_set() else self.asked).set()


async def _serve(options: ServeOptions, listener: socket.socket, tracer: Tracer) -> int:
    engine = AsyncEngine(options.config)
    settings = ServerSettings(
        api_keys=options.api_keys,
        max_upload_bytes=options.config.image.max_upload_bytes,
        rate_limit=options.rate_limit,
        allowed_origins=options.allowed_origins,
        runtime_lora=options.runtime_lora,
        admin_keys=options.admin_keys if options.runtime_workflows else (),
        playground=options.playground,
        comfy_api=options.comfy_api,
        allowed_hosts=hosts_served(options, listener),
    )
    app = create_app(engine, settings, tracer)
    server, signals = http_server(app, has_websockets=options.comfy_api), _Signals(asyncio.Event(), asyncio.Event())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.on_signal)
    reloading = _follow_hangups(options, app, signals)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _run_engine(engine, options, signals, _url(listener))
    finally:
        for task in reloading:
            task.cancel()
        server.should_exit = True
        await http
    return 0


def _follow_hangups(options: ServeOptions, app: FastAPI, signals: _Signals) -> list[asyncio.Task[None]]:
    """Install the SIGHUP handler: reload key files, else shut down. Returns the reloading tasks, if there are files."""
    loop, reloads = asyncio.get_running_loop(), list[KeyReload]()
    if options.key_source.files:
        reloads.append(KeyReload(options.key_source, app.state.keys))
    if options.runtime_workflows and options.admin_key_file:
        reloads.append(KeyReload(KeySource((), (options.admin_key_file,), {}), app.state.admin_keys))
    if reloads:
        loop.add_signal_handler(signal.SIGHUP, _ask_all, reloads)
        return [asyncio.create_task(reload.run()) for reload in reloads]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup sets SIG_IGN
        loop.add_signal_handler(signal.SIGHUP, signals.on_signal)
    return []


def _ask_all(reloads: Iterable[KeyReload]) -> None:
    for reload in reloads:
        reload.ask()


async def _run_engine(engine: AsyncEngine, options: ServeOptions, signals: _Signals, url: str) -> None:
    """Start the engine, wait for a signal and shut down. Raises StencilError if the engine cannot start or dies."""
    await engine.start()
    try:
        await run_until(signals.asked.wait(), _watch(engine, url))
    finally:
        await _shut_down(engine, options.config.engine.drain_seconds, signals)


async def _watch(engine: AsyncEngine, url: str) -> None:
    await engine.ready()
    gc.collect()
    gc.freeze()  # otherwise every full collection walks all modules, a stall of 30 ms
    names = logs.one_line(", ".join(engine.models))
    print(f"Stencil ready on {url} model {names} in {time.monotonic() - _STARTED:.1f} s", flush=True)
    raise await engine.failed()


async def _shut_down(engine: AsyncEngine, drain_seconds: float, signals: _Signals) -> None:
    drain = asyncio.create_task(engine.shutdown(drain_seconds))
    forced = asyncio.create_task(signals.forced.wait())
    await asyncio.wait({drain, forced}, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not drain.done():
        await engine.shutdown(0.0)
    await drain


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would close connections while edits still run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: FastAPI, *, has_websockets: bool = False) -> uvicorn.Server:
    """A server for `app`, to run on a socket from `bind`. has_websockets: whether it has routes of such."""
    return _HttpServer(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws=WebSocketProtocol if has_websockets else "none",
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=PING_SECONDS,
            ws_per_message_deflate=False,  # pictures are compressed already
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit this. Without it, closing one whose peer reads nothing never completes.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))
            listener.bind(address)
            listener.listen(2048)  # here, not later: with SO_REUSEADDR two sockets can bind a port, but not listen
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = getattr(error, "strerror", None) or "no such host"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return listener


def hosts_served(options: ServeOptions, listener: socket.socket) -> tuple[str, ...]:
    """Hosts that the `Host` header of requests may name, besides loopback; (): any. Without --allowed-host, restricted
    only if the server listens on loopback, since names that resolve to other addresses are unknown here.
    """
    bound = normal_host(listener.getsockname()[0])
    is_open = not options.allowed_hosts and not (bound and is_loopback(bound))
    if is_open or "*" in options.allowed_hosts:
        return ()
    return tuple(filter(None, (normal_host(options.host), *options.allowed_hosts)))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    with launched:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        sys.exit(128 + signal.SIGTERM if TERMINATED else main(OPTIONS))
