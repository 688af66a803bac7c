"""Keeps the tests out of the user's cache folder, and makes Triton interpret its kernels so that they run without a
GPU. With TRITON_INTERPRET=0, tests that need a GPU compile them instead.

Saves time: PyTorch has one thread, slow folders come first, the garbage collector does not walk imported libraries, and
HTTP clients read no certificates.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from httpx._transports import default as http_transport
from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when any module first imports Triton
# Read when PyTorch is imported, here or in a child. Tensors are tiny: two threads wait for each other longer than they
# compute, and test processes already keep all cores busy. With two, training a tiny UNet took 105 s of processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each client would read the certificates of all authorities, which takes 23 ms, and no test needs any.
http_transport.create_ssl_context = cache(http_transport.create_ssl_context)

SLOW_FOLDERS = ("e2e", "benchmarks", "tools", "model_executor")
"""Folders whose files take up to minutes each, slowest first; a file of any other takes seconds."""

settings.register_profile("stencil", deadline=None)  # a busy machine fails no test
settings.load_profile("stencil")

gc.disable()  # until all test files are imported, which takes a quarter longer with collections that find nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-ray", action="store_true", help="have end-to-end tests place their engines by Ray")


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist hand out files in the order of the collection; by default those with few tests come last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow folders first, so that several processes end at about the same time; else the order stays."""
    items.sort(key=lambda item: _rank(item.path))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _rank(path: Path) -> int:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return SLOW_FOLDERS.index(folder) if folder in SLOW_FOLDERS else len(SLOW_FOLDERS)


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if "PYTEST_XDIST_WORKER" in os.environ:  # the first process that needs compiled kernels compiles them for all
        kernels = tmp_path_factory.getbasetemp().parent / "kernels"
        kernels.mkdir(mode=0o700, exist_ok=True)
        (folder / "stencil").mkdir(mode=0o700)
        (folder / "stencil" / "kernels").symlink_to(kernels)
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def launcher() -> Iterator[str]:
    """The address of one launcher of workers for the processes of all tests, so that PyTorch is imported once."""
    from forked_server import end_warm_process

    from engine.client.processes.worker_launcher import worker_launcher

    with worker_launcher.used() as address:
        yield address
        end_warm_process()


@pytest.fixture(scope="module")
def forked_engines(launcher: str) -> Iterator[None]:
    """Engines of this process are forked, with their image processors, keepers of weights and workers."""
    from forked_processes import fork_child
    from forked_server import warm_process

    from core.ipc.launched_process import launch
    from engine.client.processes import keeper_process
    from engine.images import image_pool
    from engine.router import local_backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper_process, "spawn", partial(launch, launcher))
        for module in (local_backend, image_pool):
            patch.setattr(module, "spawn", partial(fork_child, warm_process().address))
        yield
