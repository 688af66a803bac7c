"""The process in which a user's file is imported for its workflows, and which is thrown away afterwards.

Reads an ImportOrder from stdin, and writes an ImportAnswer to what was stdout when it began.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType

import msgspec

from core.errors import WorkflowError
from core.ipc.process import die_with_parent
from core.validation import shorten
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.import_messages import ImportAnswer, ImportOrder
from entrypoints.workflows.landlock import confine_to
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.seccomp import forbid_processes_and_sockets
from entrypoints.workflows.workflow import Workflow

MAX_WORDS = 1000
"""Most characters of what a file raises that are passed on."""


def main() -> None:
    """Import, answer, and end at once, whatever threads the file has left."""
    die_with_parent()
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ImportOrder)
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    order.limits.apply()
    try:
        confine_to(os.environ["TMPDIR"])
        forbid_processes_and_sockets()
        answer = msgspec.msgpack.encode(ImportAnswer(registered=import_text(order)))
    except BaseException as error:  # a user's file may raise anything
        answer = msgspec.msgpack.encode(_failure(order, error))
    with os.fdopen(answers, "wb") as file:
        file.write(answer)
    os._exit(0)


def import_text(order: ImportOrder) -> Registered:
    """The workflows that the text's module has as globals. Raises WorkflowError, and whatever the text raises."""
    module = ModuleType(order.module)
    module.__file__ = order.file
    sys.modules[order.module] = module
    exec(compile(order.source, order.file, "exec", dont_inherit=True), vars(module))
    found = {id(each): each for each in vars(module).values() if isinstance(each, Workflow)}
    if not found:
        raise WorkflowError("it has no workflow; let a variable of the module be a Workflow(name=...)", node="")
    return Registered.together(map(compile_workflow, found.values()))


def _failure(order: ImportOrder, error: BaseException) -> ImportAnswer:
    """What a file has raised, and in which of its lines. The text of an error may fail, too."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == order.file]
    where = f"line {lines[-1]}: " if lines else ""
    if isinstance(error, WorkflowError):
        return ImportAnswer(problem=_text(f"{where}{error}"), node=_text(error.node), input=_text(error.input))
    try:
        words = f"{type(error).__name__}: {error}"
    except BaseException:
        words = type(error).__name__
    return ImportAnswer(problem=_text(f"{where}{words}"))


def _text(words: object) -> str:
    """What can be encoded."""
    return shorten(str(words), MAX_WORDS).encode(errors="replace").decode()


if __name__ == "__main__":
    main()
