"""Engines of the end-to-end tests on two machines of a Ray cluster, with `pytest --on-ray`: nothing else about a test
changes. What looks for processes finds those on the machines, too.

Not for tests of what an engine inherits of its parent: variables of the environment, and limits of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.load.ray_machines import Machines, machines

CORES = 8
"""Of each machine: for the engines of one test while those of the one before end."""

_REDIRECT = """
import os
folder = {!r}
if os.path.exists(folder):
    file = os.path.join(folder, "sitecustomize.py")
    exec(compile(open(file).read(), file, "exec"), {{"__file__": file, "__name__": "sitecustomize"}})
"""

_machines: Machines | None = None
_shims: Path | None = None  # a folder on the path of all processes of the machines


@contextmanager
def placed_there(folder: Path) -> Iterator[None]:
    """Engines that start meanwhile are on machines. folder: for their files."""
    global _machines, _shims
    shims = folder / "shims"
    shims.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{shims}:{Path.cwd()}:{Path(__file__).parent}")
        with machines(folder, CORES) as found:
            patch.undo()
            for name, value in found.environment.items():
                patch.setenv(name, value)
            _machines, _shims = found, shims
            yield
            _machines = _shims = None


def settings() -> dict[str, Any]:
    """Of an EngineConfig."""
    return {} if _machines is None else {"data_parallel_backend": "ray", "ray_address": _machines.address}


def flags() -> tuple[str, ...]:
    """Of a server."""
    return () if _machines is None else ("--data-parallel-backend", "ray", "--ray-address", _machines.address)


def hosts() -> list[psutil.Process]:
    """Processes of the machines that run hosts of engines."""
    return [] if _machines is None else _machines.hosts


def inject(folder: Path | None) -> None:
    """Have processes that start on machines run this folder's `sitecustomize.py`; None: no longer."""
    if _shims is not None:
        (_shims / "sitecustomize.py").write_text(_REDIRECT.format(str(folder)))
