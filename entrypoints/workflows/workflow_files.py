"""Reads files of workflows, each in a process of its own that is thrown away."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

import core.scheduling.ops  # noqa: F401  the check of a workflow looks ops up
from core.errors import StencilError, WorkflowError
from core.graph.catalog import with_variants
from core.graph.check import check_workflow
from core.graph.workflow import Workflow
from core.run_class import MAX_SOURCE, RunClass
from entrypoints.workflows.comfy.graph_file import GraphFile, is_graph
from entrypoints.workflows.import_limits import ImportLimits
from entrypoints.workflows.import_messages import ImportAnswer, ImportOrder
from entrypoints.workflows.registered import Registered

MAX_ANSWER = 4 * 1024 * 1024
"""Most bytes of what comes back."""

MAX_NODES = 4000
"""Most nodes of all workflows of a file: the check of a graph takes longer than its nodes grow."""

MAX_AT_ONCE = 4
"""Most files that are imported at the same time: most imports load PyTorch."""

LINGER_SECONDS = 1.0
"""For the process to end by itself when it has answered, so that its exit tells why there is no answer."""

SENT_FILE = "workflow.py"
"""What errors call a file of which a client has sent the text."""

_DEFAULT_LIMITS = ImportLimits()


def read_workflows(paths: Iterable[str | Path], limits: ImportLimits = _DEFAULT_LIMITS) -> Registered:
    """The workflows of these files, which may be ComfyUI graphs, and of the .py files that are in these folders, for
    EngineConfig. Raises WorkflowError that names the file, its node and input.
    """
    files = [file for path in paths for file in _files_at(Path(path).resolve())]
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return Registered.together(pool.map(lambda file: _read(file, limits), files))


def _files_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.py"))
    if not files:
        raise WorkflowError(f"{path}: there is no .py file in this folder", node="")
    return files


def _read(path: Path, limits: ImportLimits) -> Registered:
    source = GraphFile.read(path).program if is_graph(path) else _text_of(path)
    if len(source) > MAX_SOURCE:
        raise WorkflowError(f"{path}: has more than {MAX_SOURCE} characters", node="")
    return _import(path.stem, str(path), source, limits, _Stop())


async def read_sent(source: str, limits: ImportLimits = _DEFAULT_LIMITS) -> Registered:
    """The workflows of the text of a file, which a client has sent, beside the event loop. Raises WorkflowError that
    names its line, node and input. Cancelling this ends the import.
    """
    stop = _Stop()
    try:
        return await asyncio.to_thread(_import, "workflow", SENT_FILE, source, limits, stop)
    finally:
        stop.ask()


class _Stop:
    """Ends the process of an import from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Kill the process, also one that is started later; nothing if it has ended."""
        with self._lock:
            self._is_asked = True
            if self._process is not None:
                self._process.kill()

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._is_asked:
                process.kill()


def _import(stem: str, file: str, source: str, limits: ImportLimits, stop: _Stop) -> Registered:
    """The workflows of a text. stem, file: what its module and its errors are called after."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    module = f"{re.sub(r'[^A-Za-z0-9_]', '_', stem)}_{digest}"
    order = ImportOrder(module, file, source, limits)
    return registered_of(order, *_ask(order, stop))


def _text_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Python takes a byte order mark, too
            return file.read(MAX_SOURCE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"{path}: cannot be read: {error}", node="") from error


def registered_of(order: ImportOrder, data: bytes, why: str) -> Registered:
    """What an answer says; a hostile file may have written it. why: it cannot be read, if so. Raises WorkflowError."""
    try:
        answer = msgspec.msgpack.decode(data, type=ImportAnswer)
    except (msgspec.MsgspecError, StencilError, ValueError, RecursionError) as error:
        raise WorkflowError(f"{order.file}: {why}", node="") from error
    if answer.registered is None:
        raise WorkflowError(f"{order.file}, {answer.problem}", node=answer.node, input=answer.input)
    _check(order.file, answer.registered.workflows)
    return Registered(answer.registered.workflows, tuple(_with_text(each, order) for each in answer.registered.classes))


def _check(file: str, workflows: Sequence[Workflow]) -> None:
    """Raises WorkflowError that names the file."""
    if (num_nodes := sum(len(workflow.nodes) for workflow in workflows)) > MAX_NODES:
        raise WorkflowError(f"{file}: its workflows have {num_nodes} nodes, and may have {MAX_NODES}", node="")
    for workflow in workflows:
        try:
            for each in with_variants(workflow):
                check_workflow(each)
        except WorkflowError as error:
            raise WorkflowError(f"{file}: {error}", node=error.node, input=error.input) from error


def _with_text(run_class: RunClass, order: ImportOrder) -> RunClass:
    """A class of the file with the text that was read, which workers run."""
    if not run_class.path.startswith(f"{order.module}:"):
        return run_class
    return msgspec.structs.replace(run_class, source=order.source, file=order.file)


def _ask(order: ImportOrder, stop: _Stop) -> tuple[bytes, str]:
    """(what the process has answered, why that cannot be read if it cannot)"""
    with tempfile.TemporaryDirectory(prefix="stencil-import-", ignore_cleanup_errors=True) as scratch:
        return _ask_process(order, scratch, stop)


def _ask_process(order: ImportOrder, scratch: str, stop: _Stop) -> tuple[bytes, str]:
    """scratch: the folder that the process may write to."""
    deadline = time.monotonic() + order.limits.seconds
    with open(os.memfd_create("stencil-import", os.MFD_CLOEXEC), "w+b") as file:
        file.write(msgspec.msgpack.encode(order))
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "entrypoints.workflows.importer"],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(scratch),
            start_new_session=True,
        )
    stop.follow(process)
    assert process.stdout is not None, "it is a pipe"
    with process.stdout as stdout:
        try:
            data, why = _answer(stdout.fileno(), order.limits, deadline)
            if not why:
                why = _exit_of(process, deadline)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
            process.wait()
    return data, why or _in_words(process.returncode)


def _answer(fd: int, limits: ImportLimits, deadline: float) -> tuple[bytes, str]:
    """(all that is written, why not all of it was read)"""
    data = bytearray()
    while _is_readable(fd, deadline - time.monotonic()):
        piece = os.read(fd, 65536)
        data += piece
        if not piece:
            return bytes(data), ""
        if len(data) > MAX_ANSWER:
            return b"", f"its process answered more than {MAX_ANSWER} bytes"
    return b"", f"its import took longer than {limits.seconds:g} s"


def _exit_of(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Let a process end by itself; why it does not, or "" ."""
    pidfd = os.pidfd_open(process.pid)
    try:
        patience = min(LINGER_SECONDS, deadline - time.monotonic())
        return "" if _is_readable(pidfd, patience) else "its process closed its answer and did not end"
    finally:
        os.close(pidfd)


def _is_readable(fd: int, seconds: float) -> bool:
    """Wait until there is something to read, or the end; False: the time has passed."""
    waiting = select.poll()  # takes any descriptor, unlike select
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


def _in_words(returncode: int) -> str:
    """Why a process has ended without an answer."""
    if returncode == -signal.SIGXCPU:
        return "its import took more processor time than it may"
    return f"its import ended its process: {f'signal {-returncode}' if returncode < 0 else f'exit code {returncode}'}"


def _environment(scratch: str) -> dict[str, str]:
    """What a process needs to find Python's modules and their libraries, and nothing else: no keys. scratch: where it
    may write; PyTorch makes a folder when it is imported unless it is told one.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    folders = dict.fromkeys(("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), scratch)
    return kept | threads | folders | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
