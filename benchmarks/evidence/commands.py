"""Benchmarks that are commands of their own: the lines of JSON that they print are their result."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.evidence.results import Result
from benchmarks.load.server import ROOT, end_with_parent


def run_command(module: str, *flags: str) -> Result:
    """Raises subprocess.CalledProcessError if it fails."""
    command = [sys.executable, "-m", module, *flags]
    print("+", "python", *command[1:], flush=True)
    output = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=end_with_parent
    ).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {"command": " ".join(["python", *command[1:]]), "lines": lines}
