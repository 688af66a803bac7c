"""500 malformed ComfyUI graphs: each is one refusal of a line, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from random import Random

import pytest
from malformed_comfy_graphs import malformed

from core.errors import WorkflowError
from entrypoints.workflows.workflow_files import read_workflows

NUMBER = 500
MOST_SECONDS = 10.0
MOST_CHARACTERS = 1000


def test_each_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process would import what was read."""

    def start(*args: object, **named: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    random, file = Random(0), tmp_path / "graph.json"
    seconds = 0.0
    for make in malformed(NUMBER):
        made = make(random)
        file.write_text(made if isinstance(made, str) else json.dumps(made))
        began = time.perf_counter()
        with pytest.raises(WorkflowError) as caught:
            read_workflows([file])
        seconds += time.perf_counter() - began
        problem = str(caught.value)
        assert problem.startswith(f"{file}: "), make.__name__
        assert len(problem) - len(str(file)) < MOST_CHARACTERS, make.__name__
        assert problem.isprintable(), (make.__name__, problem)
    assert seconds < MOST_SECONDS
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(WorkflowError, match="cannot be read"):
        read_workflows([file])
    for letter in (" ", "é"):  # which the limit may cut in two
        file.write_text(letter * (4 * 1024 * 1024 + 1))
        with pytest.raises(WorkflowError, match="has more than 4194304 bytes"):
            read_workflows([file])
    with pytest.raises(WorkflowError, match="cannot be read"):
        read_workflows([tmp_path / "none.json"])
