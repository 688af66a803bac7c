"""One test of a Ray cluster in the ordinary suite; `make test-ray` runs all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
TESTS = Path(__file__).with_name("test_ray.py")


def test_engines_on_two_machines() -> None:
    try:
        subprocess.run([*NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "ray", "-k", "both_machines"]
    with tempfile.TemporaryDirectory() as folder:  # empty, as where Ray has never run; its name is short: of sockets
        command += ["--basetemp", f"{folder}/p", str(TESTS)]
        environment = {**os.environ, "TMPDIR": folder}
        ran = subprocess.run([*NAMESPACE, *command], check=False, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
