"""The folder of results: a JSON file for each measurement, so that an interrupted sweep resumes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.load.server import ROOT, end_with_parent

Result = dict[str, Any]


class Results:
    """Files under `folder`, by names with slashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Result | None:
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def get_or_make(self, name: str, make: Callable[[], Result]) -> Result:
        """What is there, or what `make` returns, with the seconds it took."""
        if (found := self.find(name)) is not None:
            return found
        start = time.monotonic()
        result = make()
        self.put(name, result | {"took_s": round(time.monotonic() - start, 1)})
        return result

    def put(self, name: str, result: Result) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        unfinished.rename(path)

    def all(self, prefix: str) -> Iterator[Result]:
        """Results whose names begin so, by name."""
        for path in sorted(self.folder.glob(f"{prefix}*.json")):
            yield json.loads(path.read_text())

    def drop(self, part: str) -> None:
        """Delete a part's results, so that it is measured again."""
        for path in [*self.folder.glob(f"{part}/*.json"), *self.folder.glob(f"{part}.json")]:
            path.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def run_command(module: str, *flags: str) -> Result:
    """Runs a benchmark that is a command; its lines of JSON are the result. Raises subprocess.CalledProcessError."""
    command = [sys.executable, "-m", module, *flags]
    print("+", "python", *command[1:], flush=True)
    output = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=end_with_parent
    ).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {"command": " ".join(["python", *command[1:]]), "lines": lines}
