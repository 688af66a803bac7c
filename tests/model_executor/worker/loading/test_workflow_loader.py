"""Workflows whose classes a worker imports while it serves."""

from __future__ import annotations

import queue
import sys
from dataclasses import replace

import pytest
import torch
from run_workflows import DIAMOND

from core.errors import ConfigError
from core.failure import Failure
from core.messages.worker import DropWorkflow, LoadWorkflow, WorkerFailed, WorkflowLoaded
from core.run_class import RunClass
from model_executor.worker.loading.class_loader import ClassLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.workflow_loader import WorkflowLoader
from model_executor.worker.stores import time_limits
from model_executor.worker.stores.time_limits import TimeLimits
from model_executor.worker.stores.user_classes import UserClasses

CPU = torch.device("cpu")
TEXT = """
class Same:
    def load(self, device, dtype):
        return 8

    def execute(self):
        return {}

class Lazy:
    pass
"""


class Worker:
    """What of a worker loads classes."""

    def __init__(self, *first: RunClass) -> None:
        self.classes, self.answers = UserClasses(first, {"first": [each.name for each in first]}), queue.SimpleQueue()
        self.failed: list[WorkerFailed] = []
        self.loader, thread = ClassLoader(self.classes, CPU, TimeLimits(0, self.failed.append)), LoaderThread(CPU)
        self.workflows = WorkflowLoader(0, self.classes, self.loader, self.answers.put, thread)
        self._thread = thread

    def load(self, name: str, *classes: RunClass) -> WorkflowLoaded:
        load = LoadWorkflow.of(replace(DIAMOND, name=name), classes)
        self.workflows.load(load)
        answer: WorkflowLoaded = self.answers.get(timeout=10)
        return answer

    def drop(self, name: str) -> None:
        self.workflows.drop(DropWorkflow(name))
        self._thread.put(lambda: None)()


def class_of(module: str, name: str = "Same", text: str = TEXT) -> RunClass:
    return RunClass(name=f"{module}:{name}", path=f"{module}:{name}", source=text, file="workflow.py")


def test_a_class_is_there_while_a_workflow_names_it() -> None:
    worker, one, two = Worker(), class_of("one"), class_of("two")
    for name, classes in (("a", [one]), ("b", [one]), ("c", [two])):
        assert worker.load(name, *classes).failure is None
    assert worker.loader.load(one.key).nbytes == 8
    assert worker.classes.configs[one.name] == one
    worker.drop("a")
    assert set(worker.classes.configs) == {one.name, two.name}
    assert {"one", "two"} <= sys.modules.keys()
    worker.drop("b")
    assert set(worker.classes.configs) == {two.name}
    assert "one" not in sys.modules
    worker.drop("c")
    assert "two" not in sys.modules
    assert worker.load("a", one).failure is None, "it may come back"
    worker.drop("a")


def test_classes_of_the_start_are_dropped_with_their_workflow() -> None:
    first = class_of("of_start")
    worker = Worker(first)
    assert "of_start" in sys.modules
    worker.drop("first")
    assert not worker.classes.configs
    assert "of_start" not in sys.modules


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (class_of("bad", "Lazy"), "path bad:Lazy has no method load"),
        (class_of("bad", "None_"), "no attribute 'None_'"),
        (class_of("bad", text="raise SystemExit(3)"), "SystemExit: 3"),
        (RunClass(name="x", path="no_such_module:X"), "ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_be_used_leaves_nothing(bad: RunClass, why: str) -> None:
    worker, kept = Worker(), class_of("kept")
    worker.load("a", kept)
    failure = worker.load("b", bad).failure
    assert failure is not None
    assert (failure.kind, failure.code) == ("invalid_request", "invalid_workflow")
    assert why in failure.message
    assert set(worker.classes.configs) == {kept.name}
    assert "bad" not in sys.modules
    with pytest.raises(ConfigError, match="could not import it again"):  # of a restarted worker
        worker.loader.load(bad.key)
    worker.drop("a")


def test_an_import_that_takes_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "IMPORT_SECONDS", 0.05)
    worker, slow = Worker(), class_of("slow", text="import time; time.sleep(0.3)\n" + TEXT)
    worker.load("a", slow)
    cause = f"{slow.name} ({slow.path}): importing took longer than 0.05 s"
    assert worker.failed == [WorkerFailed(0, Failure("config", cause), slow.key)]
    worker.drop("a")
