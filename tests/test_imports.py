"""The import law: which package may import which, checked by parsing the sources, with imports in functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
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


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {module_name(path): path for path in SOURCES}


@dataclass(frozen=True)
class Law:
    """What the modules of one folder may import.

    ours: folders, each without those below it, and single modules. others: packages of other projects. no_standard:
    modules of the standard library that are forbidden.
    """

    ours: tuple[str, ...]
    others: frozenset[str] = frozenset()
    no_standard: frozenset[str] = frozenset()


def below(folder: str) -> tuple[str, ...]:
    """The folder and all folders below it."""
    folders = {name.rpartition(".")[0] for name in MODULES}
    return tuple(sorted(name for name in folders if name == folder or name.startswith(folder + ".")))


GRAPH = ("core.graph", "core.graph.workflows")
MESSAGES = ("core", *GRAPH, "core.costs", "core.messages", "core.messages.specs")
SCHEDULING = "core.scheduling"
OPS, POLICIES, NODE_CACHE = f"{SCHEDULING}.ops", f"{SCHEDULING}.policies", f"{SCHEDULING}.node_cache"
REQUESTS, VALUES, RANKS = f"{SCHEDULING}.requests", f"{SCHEDULING}.values", f"{SCHEDULING}.ranks"
CACHE = "core.cache.activation_cache"
PREDICTOR = f"{SCHEDULING}.reports.predictor"
SEEN_BY_POLICIES = (
    *(REQUESTS, NODE_CACHE, f"{SCHEDULING}.dispatch", f"{SCHEDULING}.view"),
    *(f"{SCHEDULING}.model_demand", f"{RANKS}.residency"),
)
"""What a policy may know besides messages, costs, graphs and ops."""
SEEN_BY_CACHE = (NODE_CACHE, OPS, PREDICTOR, REQUESTS)
"""What the activation cache may know of scheduling, where it does work for requests."""
CORE = (*MESSAGES, "core.cache", *below(SCHEDULING), "core.routing")
SHARED = (*CORE, "core.ipc")
EXECUTOR = "model_executor.executor"
CHECKPOINT, GRAPHS, KERNELS, MODELS, PAGES, PARALLEL, PATCHES, SAMPLERS, SEGMENTERS, WEIGHTS, WORKER = (
    f"model_executor.{folder}"
    for folder in (
        *("checkpoint", "graphs", "kernels", "models", "page_cache"),
        *("parallel", "patches", "samplers", "segmenters", "weights", "worker"),
    )
)
SEEN_BY_DENOISERS = (GRAPHS, KERNELS, MODELS, PAGES, PATCHES)
TORCH = frozenset({"diffusers", "huggingface_hub", "msgspec", "numpy", "safetensors", "torch", "transformers"})
SMALL = frozenset({"msgspec", "numpy"})
ENGINE = frozenset({"PIL", "msgspec", "numpy", "prometheus_client", "uvloop", "zmq"})
ENTRY = ENGINE - {"zmq"} | {"fastapi", "httptools", "python_multipart", "starlette", "tqdm", "uvicorn", "websockets"}
CLIENT = below("engine.client")
SEEN = (*CLIENT, "engine.observability")
"""Modules of the engine that entrypoints may import."""
HOSTS = ("engine.router", "engine.engine_core", "engine.client.processes")
"""What a host of engines uses of the processes that it stands for."""
OPENAI = "entrypoints.openai"


def pure(*ours: str) -> Law:
    return Law(ours, SMALL, IMPURE)


def of_model(*ours: str) -> Law:
    """The law of a folder of `model_executor` that may import these folders, and what all of them may."""
    return Law(("core", "core.ipc", "model_executor", *ours), TORCH)


LAWS = {
    # folder or module -> its law; for each module the longest matching prefix applies
    "core": pure("core"),
    "core.config": pure("core", "core.graph"),
    "core.costs": pure("core", *GRAPH, "core.costs"),
    "core.messages": pure(*MESSAGES),
    "core.graph": pure("core.errors", "core.interpolation", *GRAPH),
    "core.cache": pure(*MESSAGES, "core.cache", NODE_CACHE),
    **dict.fromkeys(
        (CACHE, "core.cache.page_costs", "core.cache.priming_batches", "core.cache.request_prefetcher"),
        pure(*MESSAGES, "core.cache", *SEEN_BY_CACHE),
    ),
    "core.routing": pure(*MESSAGES, OPS, f"{REQUESTS}.fair_queue", "core.routing"),
    SCHEDULING: pure(*MESSAGES, *(folder for folder in below(SCHEDULING) if not folder.startswith(POLICIES))),
    f"{SCHEDULING}.scheduler": pure(*MESSAGES, *below(SCHEDULING), CACHE),
    f"{SCHEDULING}.node_cache": pure(*MESSAGES, REQUESTS),
    OPS: pure(*MESSAGES, NODE_CACHE, REQUESTS, OPS),
    REQUESTS: pure(*MESSAGES, REQUESTS),
    VALUES: pure(*MESSAGES, REQUESTS, VALUES),
    RANKS: pure(*MESSAGES, REQUESTS, RANKS),
    f"{SCHEDULING}.recovery": pure(*MESSAGES, NODE_CACHE, REQUESTS, VALUES, RANKS, f"{SCHEDULING}.recovery"),
    f"{SCHEDULING}.reports": pure(*MESSAGES, NODE_CACHE, OPS, REQUESTS, RANKS, f"{SCHEDULING}.reports"),
    POLICIES: pure(*MESSAGES, *SEEN_BY_POLICIES, OPS, *below(POLICIES)),
    "core.ipc": Law(("core", "core.ipc"), SMALL),
    "core.ipc.launcher": Law(("core", "core.ipc"), frozenset({"setproctitle"})),
    EXECUTOR: Law((*MESSAGES, "core.ipc"), SMALL),
    "model_executor": Law(("core", "core.ipc", "model_executor"), TORCH),
    KERNELS: of_model(KERNELS, PAGES),
    f"{KERNELS}.gpu_operators": Law(("core", KERNELS, PAGES), frozenset({"torch", "triton"})),
    f"{KERNELS}.invariant_kernels": Law((), frozenset({"triton"})),
    f"{KERNELS}.triton_kernels": Law((), frozenset({"triton"})),
    f"{KERNELS}.unet_kernels": Law((f"{KERNELS}.triton_kernels",), frozenset({"triton"})),
    SAMPLERS: Law((SAMPLERS,), TORCH),
    PAGES: of_model("core.messages", KERNELS, PAGES),
    PATCHES: of_model(CHECKPOINT, KERNELS, PATCHES),
    PARALLEL: of_model(KERNELS, MODELS, PARALLEL),
    SEGMENTERS: of_model(CHECKPOINT, SEGMENTERS),
    GRAPHS: of_model(KERNELS, MODELS, PAGES, GRAPHS),
    CHECKPOINT: of_model(KERNELS, MODELS, PATCHES, CHECKPOINT),
    WEIGHTS: of_model("core.messages", CHECKPOINT, MODELS, f"{MODELS}.controlnet", WEIGHTS),
    MODELS: of_model(PAGES, PARALLEL, PATCHES, SAMPLERS, MODELS),
    f"{MODELS}.registry": of_model(CHECKPOINT, MODELS, f"{MODELS}.families"),
    f"{MODELS}.vae": of_model(KERNELS, MODELS, f"{MODELS}.vae"),
    f"{MODELS}.unet": of_model(*SEEN_BY_DENOISERS, f"{MODELS}.unet"),
    f"{MODELS}.transformer": of_model(*SEEN_BY_DENOISERS, PARALLEL, f"{MODELS}.transformer"),
    f"{MODELS}.controlnet": of_model(
        *(CHECKPOINT, *SEEN_BY_DENOISERS, PARALLEL, f"{MODELS}.unet", f"{MODELS}.transformer", f"{MODELS}.controlnet")
    ),
    f"{MODELS}.families": of_model(CHECKPOINT, KERNELS, PARALLEL, PATCHES, SAMPLERS, *below(MODELS)),
    WORKER: of_model(*MESSAGES, CHECKPOINT, PAGES, PARALLEL, WEIGHTS, *below(WORKER)),
    f"{WORKER}.stores": of_model("core.messages", MODELS, SEGMENTERS, f"{WORKER}.stores"),
    f"{WORKER}.loading": of_model(
        *("core.messages", *GRAPH, OPS, CHECKPOINT, MODELS, PAGES, PATCHES, SEGMENTERS, WEIGHTS),
        *(f"{MODELS}.controlnet", f"{WORKER}.loading", f"{WORKER}.stores"),
    ),
    f"{WORKER}.ops": of_model(
        *("core.messages", *GRAPH, OPS, KERNELS, MODELS, PAGES, PARALLEL, SAMPLERS),
        *(f"{MODELS}.controlnet", f"{WORKER}.stores", f"{WORKER}.ops"),
    ),
    f"{WORKER}.probes": of_model(
        *(*MESSAGES, OPS, CHECKPOINT, *SEEN_BY_DENOISERS, f"{MODELS}.transformer", f"{MODELS}.controlnet", PARALLEL),
        *(WORKER, f"{WORKER}.loading", f"{WORKER}.probes"),
    ),
    "engine.images": Law((*SHARED, "engine.images"), ENGINE),
    "engine.observability": Law((*SHARED, "engine.observability"), ENGINE),
    "engine.observability.otlp_tracing": Law(("engine.observability",), frozenset({"opentelemetry"})),
    "engine.engine_core": Law((*SHARED, "engine.engine_core", "engine.observability", EXECUTOR), ENGINE),
    "engine.router": Law((*SHARED, "engine.router", "engine.engine_core", "engine.observability"), ENGINE),
    "engine.cluster": Law((*SHARED, *HOSTS, "engine.cluster"), ENGINE),
    **{
        f"engine.cluster.{name}": Law((*SHARED, *HOSTS, "engine.cluster"), ENGINE | {"ray"})
        for name in ("host_actor", "ray_backend", "ray_cluster", "ray_host")
    },
    "engine.client": Law((*SHARED, *SEEN, "engine.images", "engine.router", "engine.cluster"), ENGINE),
    "entrypoints.playground": Law(("entrypoints.playground",), ENTRY),
    "entrypoints.comfy_api": Law(
        (*SHARED, *SEEN, "entrypoints", "entrypoints.comfy_api", *below("entrypoints.workflows"), *below(OPENAI)), ENTRY
    ),
    "entrypoints.calibration": Law((*SHARED, *SEEN, "engine.images", "entrypoints", "entrypoints.calibration"), ENTRY),
    OPENAI: Law(
        (
            *(*SHARED, *SEEN, "entrypoints", *below(OPENAI)),
            *("entrypoints.comfy_api", "entrypoints.playground", "entrypoints.workflows"),
        ),
        ENTRY,
    ),
    f"{OPENAI}.fields": Law((*SHARED, *SEEN, "entrypoints", f"{OPENAI}.fields"), ENTRY),
    "entrypoints.workflows": Law(
        (
            *("core", "core.graph", "core.ipc", OPS, "entrypoints.workflows"),
            *("entrypoints.workflows.comfy", "entrypoints.workflows.optimizations"),
        ),
        SMALL,
    ),
    "entrypoints.workflows.comfy": Law(("core", "core.graph", "core.ipc", "entrypoints.workflows.comfy"), SMALL),
    "entrypoints.workflows.optimizations": Law(("core", "core.graph", "entrypoints.workflows.optimizations"), SMALL),
    "entrypoints.workflows.families": Law(("core", *GRAPH, *below("entrypoints.workflows")), SMALL),
    "entrypoints": Law(
        (*SHARED, *SEEN, "entrypoints", "entrypoints.calibration", *below("entrypoints.workflows"), *below(OPENAI)),
        ENTRY,
    ),
}
LAZY = {
    ("engine.observability.tracing", "engine.observability.otlp_tracing"),
    ("model_executor.kernels.operators", "model_executor.kernels.gpu_operators"),
    ("model_executor.kernels.gpu_operators", "model_executor.kernels.invariant"),
}
"""Factories that import an implementation of their own interface, inside a function, when it is asked for."""


def imports(source: str) -> Iterator[str]:
    """Full names of all that `source` imports; ``from a import b`` counts as a.b, for b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    """The module that an imported name is, or is taken from."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def folder_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def is_lawful(name: str, law: Law) -> bool:
    top = name.split(".")[0]
    if top in PACKAGES:
        module = module_of(name)
        return module in law.ours or folder_of(module) in law.ours
    if top in sys.stdlib_module_names:
        return top not in law.no_standard
    return top in law.others


def law_of(module: str) -> Law:
    region = max((region for region in LAWS if module == region or module.startswith(region + ".")), key=len)
    return LAWS[region]


def violations(module: str, source: str) -> list[str]:
    """Imports of `module` that its law forbids. Relative imports are forbidden everywhere."""
    return [name for name in imports(source) if not is_lawful(name, law_of(module))]


def import_graph(package: str) -> dict[str, set[str]]:
    """module -> modules of the same package that it imports, for type checking too."""
    return {
        module: {
            other
            for other in map(module_of, imports(path.read_text()))
            if other.split(".")[0] == package and other != module and (module, other) not in LAZY
        }
        for module, path in MODULES.items()
        if module.split(".")[0] == package
    }


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    TopologicalSorter(import_graph(package)).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ["engine", "model_executor"])
def test_circles_are_found(package: str) -> None:
    """Lazy factories would form one if they were not excepted."""
    graph = import_graph(package)
    for module, other in LAZY & {(a, b) for a, b in LAZY if a.startswith(package)}:
        graph[module].add(other)
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.scheduling.scheduler", "import torch"),
        ("core.scheduling.scheduler", "import asyncio"),
        ("core.scheduling.policies.step_pass", "from core.scheduling.scheduler import StepScheduler"),
        ("core.scheduling.policies.step_pass", "from core.cache.priming import PrimingJob"),
        ("core.scheduling.dispatcher", "from core.cache.activation_cache import ActivationCache"),
        ("core.scheduling.scheduler", "from core.cache.page_reservations import PageReservations"),
        ("core.scheduling.dispatcher", "from core.scheduling.policies.policy import SchedulingPolicy"),
        ("core.scheduling.values.values", "from core.scheduling.ranks.ranks import Ranks"),
        ("core.scheduling.requests.request", "from core.scheduling.view import View"),
        (
            "core.scheduling.ops.denoise",
            "if TYPE_CHECKING:\n    from core.cache.activation_cache import ActivationCache",
        ),
        ("core.cache.activation_cache", "from core.scheduling.scheduler import StepScheduler"),
        ("core.cache.activation_cache", "from core.scheduling.view import View"),
        ("core.cache.page_reservations", "from core.scheduling.requests.request import Request"),
        ("core.scheduling.scheduler", "from time import monotonic"),
        ("core.scheduling.scheduler", "from core import ipc"),
        ("core.scheduling.scheduler", "from core.ipc.ring import Channel"),
        ("core.scheduling.scheduler", "def late():\n    from engine.router.router import Router"),
        ("core.cache.priming", "from core.scheduling.requests.request import Request"),
        ("core.cache.priming", "if TYPE_CHECKING:\n    from core.scheduling.requests.request import Request"),
        ("core.graph.workflow", "from core.costs.cost_model import CostModel"),
        ("core.costs.cost_model", "from core.cache.priming import PrimingJob"),
        ("core.routing.fleet", "from core.scheduling.scheduler import StepScheduler"),
        ("core.config", "from core.cache.priming import PrimingJob"),
        ("core.ipc.ring", "from engine.engine_core.engine_core import EngineCore"),
        ("core.ipc.ring", "import zmq"),
        ("model_executor.worker.main", "from engine.observability.metrics import Metrics"),
        ("model_executor.executor", "import torch"),
        ("model_executor.kernels.operators", "from model_executor.models.base import Row"),
        ("model_executor.kernels.unet_kernels", "import torch"),
        ("model_executor.models.base", "from model_executor.models.families.vae_family import VaeFamily"),
        ("model_executor.models.base", "from model_executor.checkpoint.loader import ModelCheckpoint"),
        ("model_executor.models.vae.qwen_vae", "from model_executor.models.families.vae_family import VaeFamily"),
        ("model_executor.models.unet.unet", "from model_executor.models.transformer.blocks import Block"),
        ("model_executor.models.transformer.denoiser", "from model_executor.models.families.flux import Flux"),
        ("model_executor.page_cache.page_store", "from model_executor.worker.stores.tensor_store import TensorStore"),
        ("model_executor.checkpoint.loader", "from model_executor.worker.worker import Worker"),
        ("model_executor.worker.ops.denoise", "from model_executor.worker.runner import Runner"),
        ("model_executor.worker.stores.exchange", "from model_executor.worker.ops.context import WorkerContext"),
        ("model_executor.executor", "from model_executor.worker.main import main"),
        ("engine.engine_core.engine_core", "from model_executor.worker import worker"),
        ("engine.engine_core.engine_core", "import torch.nn as nn"),
        ("engine.engine_core.engine_core", "import fastapi"),
        ("engine.engine_core.engine_core", "from opentelemetry import trace"),
        ("engine.images.image_ops", "from engine.client.edit_types import EditInput"),
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
        ("core.scheduling.scheduler", "import math\nimport numpy as np\nfrom core.graph.workflow import Node"),
        ("core.scheduling.scheduler", "from core.cache.activation_cache import ActivationCache"),
        ("core.cache.activation_cache", "from core.scheduling.requests.request import Request"),
        ("core.ipc.ring", "import asyncio, socket\nfrom core.errors import EngineDeadError"),
        ("model_executor.worker.main", "import torch\nfrom model_executor.worker.runner import Runner"),
        ("engine.engine_core.engine_core", "from model_executor.executor import Executor"),
        ("entrypoints.serve", "import uvicorn\nfrom engine.client.async_engine import AsyncEngine"),
    ],
)
def test_law_allows(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    "module", ["entrypoints.serve", "engine.engine_core.engine_process", "engine.client.async_engine"]
)
def test_only_workers_load_torch_and_only_clusters_ray(module: str) -> None:
    """What the law cannot detect: torch imported by a third-party package."""
    absent = {"torch", "diffusers", "transformers", "ray"}
    code = f"import sys, {module}; sys.exit(' '.join({absent} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_public_names_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, entrypoints; assert 'entrypoints.image_engine' not in sys.modules; "
        "assert entrypoints.image_engine.ImageEngine is entrypoints.ImageEngine; "
        "assert not hasattr(entrypoints, 'no_such_name')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_test_folder_is_a_package() -> None:
    """A lone tests/core/__init__.py would shadow the real `core`."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_test_file_names_are_unique() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
