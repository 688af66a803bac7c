"""The process of `test_load_memory.py` that loads checkpoints and measures its own memory meanwhile."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import torch

from core.config import ModelConfig
from core.ipc.heap import return_freed_memory
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.worker.loading.resident import ResidentModels


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of a process. config: dtype, quantization, a small checkpoint, and the large ones, as JSON. fds:
    where what was found is written, as JSON."""
    dtype, quantization, small, *large = json.loads(config)

    def load(*paths: str) -> ResidentModels:
        models = ResidentModels.open(
            [
                ModelConfig(model=path, served_model_name=path, dtype=dtype, device="cpu", quantization=quantization)
                for path in paths
            ]
        )
        models.load_all()
        return models

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(status())

    torch.set_num_threads(1)
    return_freed_memory()
    quiet_libraries()
    first = load(small)  # what comes with the first of any size: modules, kernels
    before, samples, done = status(), list[tuple[int, int]](), threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    models = load(*large)
    done.set()
    watcher.join()
    after = status()
    peak, held = max(anon for anon, _ in samples) - before[0], sum(after) - sum(before)
    found = {"peak": peak, "held": held, "told": sum(loaded.nbytes for loaded in models.loaded)}
    os.write(fds[0], json.dumps(found).encode())
    del first


def status() -> tuple[int, int]:
    """Private memory of this process, and mapped pages of files, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private, mapped = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return private, mapped
