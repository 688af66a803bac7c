"""The import law: who may know of whom, read from the sources with `ast`, wherever in a file an import stands."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "engine", "model_executor", "entrypoints")

IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "ctypes",
        "datetime",
        "http",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
    }
)
"""Standard modules that wait, do I/O or read a clock."""


@dataclass(frozen=True)
class Law:
    """What the modules of one region may import besides the standard library: module prefixes, ours and others'."""

    ours: tuple[str, ...]
    others: frozenset[str]
    not_ours: tuple[str, ...] = ()
    no_standard: frozenset[str] = frozenset()


LAWS = {
    # region -> its law; the longest region that a module's name starts with holds
    "core": Law(("core",), frozenset({"msgspec", "numpy"}), not_ours=("core.ipc",), no_standard=IMPURE),
    "core.ipc": Law(("core",), frozenset({"msgspec", "numpy"})),
    "model_executor.executor": Law(("core",), frozenset({"msgspec", "numpy"})),
    "model_executor": Law(
        ("core", "model_executor"),
        frozenset({"diffusers", "huggingface_hub", "msgspec", "numpy", "safetensors", "torch", "transformers"}),
    ),
    "model_executor.kernels.gpu_operators": Law(("core", "model_executor"), frozenset({"torch", "triton"})),
    "model_executor.kernels.triton_kernels": Law((), frozenset({"triton"})),
    "engine": Law(
        ("core", "engine", "model_executor.executor"),
        frozenset({"PIL", "msgspec", "numpy", "prometheus_client", "uvloop", "zmq"}),
    ),
    "engine.observability.otlp_tracing": Law(("engine",), frozenset({"opentelemetry"})),
    "entrypoints": Law(
        ("core", "engine", "entrypoints"),
        frozenset(
            {
                "PIL",
                "fastapi",
                "httptools",
                "msgspec",
                "numpy",
                "prometheus_client",
                "python_multipart",
                "starlette",
                "tqdm",
                "uvicorn",
                "uvloop",
            }
        ),
    ),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports(source: str) -> Iterator[str]:
    """Full names of all that `source` imports; ``from a import b`` counts as a.b, for b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def is_lawful(name: str, law: Law) -> bool:
    top = name.split(".")[0]
    if within(name, PACKAGES):
        return within(name, law.ours) and not within(name, law.not_ours)
    if top in sys.stdlib_module_names:
        return top not in law.no_standard
    return top in law.others


def violations(module: str, source: str) -> list[str]:
    """Imports of `module` that its law forbids. Relative imports are forbidden everywhere."""
    region = max((region for region in LAWS if within(module, (region,))), key=len)
    return [name for name in imports(source) if not is_lawful(name, LAWS[region])]


SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.scheduling.scheduler", "import torch"),
        ("core.scheduling.scheduler", "import asyncio"),
        ("core.scheduling.scheduler", "from time import monotonic"),
        ("core.scheduling.scheduler", "from core import ipc"),
        ("core.scheduling.scheduler", "from core.ipc.ring import Channel"),
        ("core.scheduling.scheduler", "def late():\n    from engine.router import Router"),
        ("core.ipc.ring", "from engine.engine_core import EngineCore"),
        ("core.ipc.ring", "import zmq"),
        ("model_executor.worker.worker", "from engine.metrics import Metrics"),
        ("model_executor.executor", "import torch"),
        ("model_executor.executor", "from model_executor.worker import main"),
        ("engine.engine_core.engine_core", "from model_executor import worker"),
        ("engine.engine_core.engine_core", "import torch.nn as nn"),
        ("engine.engine_core.engine_core", "import fastapi"),
        ("engine.engine_core.engine_core", "from opentelemetry import trace"),
        ("entrypoints.serve", "from model_executor.executor import Executor"),
        ("entrypoints.serve", "from . import openai"),
        ("entrypoints.serve", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ],
)
def test_law_forbids(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.scheduling.scheduler", "import math\nimport numpy as np\nfrom core.stages import Node"),
        ("core.ipc.ring", "import asyncio, socket\nfrom core.errors import EngineDeadError"),
        ("model_executor.worker.worker", "import torch\nfrom model_executor.runner import Runner"),
        ("engine.engine_core.engine_core", "from model_executor.executor import Executor"),
        ("entrypoints.serve", "import uvicorn\nfrom engine.async_engine import AsyncEngine"),
    ],
)
def test_law_allows(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    "module", ["entrypoints.serve", "engine.engine_core.engine_process", "engine.client.async_engine"]
)
def test_only_workers_load_torch(module: str) -> None:
    """What the law cannot see: torch reached through somebody else's package."""
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'diffusers', 'transformers'}} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_test_folder_is_a_package() -> None:
    """A lone tests/core/__init__.py would shadow the real `core`."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_test_file_names_are_unique() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
