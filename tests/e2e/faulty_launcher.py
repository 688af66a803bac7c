"""A launcher whose children have the faults of `fault_kit.shim` in them. It is forked by the launcher of all tests, and
has imported what workers need.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from core.ipc import launcher
from model_executor.worker.launcher import main


def serve(config: bytes, fds: list[int]) -> None:
    """As the launcher of workers. Each child has its faults before it runs: a spawned one has them when it imports."""
    run_child = launcher.run_child

    def run_with_faults(name: str, header: dict[str, Any], config: bytes) -> None:
        inject_all(Path(os.environ["PYTHONPATH"]))
        run_child(name, header, config)

    launcher.run_child = run_with_faults
    main(config, fds)


def inject_all(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("faults", folder / "sitecustomize.py")
    assert spec
    assert spec.loader
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    for name, inject in faults.INJECTED.items():
        if name in sys.modules:
            inject(sys.modules[name], str(folder))
