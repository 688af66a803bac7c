"""What `python -m entrypoints.edit --workflow` reads from its command line, and where it writes what is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.errors import InvalidRequestError
from core.graph.op import Port
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from core.run_class import RunClass
from entrypoints.class_inputs import ClassInput
from entrypoints.openai.fields.own_fields import OwnFields
from entrypoints.workflows.workflow_files import read_workflows


def read_workflow(path: Path) -> tuple[Workflow, tuple[RunClass, ...]]:
    """The one workflow of a file, and its classes. Raises WorkflowError, InvalidRequestError."""
    registered = read_workflows([path])
    if len(registered.workflows) != 1:
        names = ", ".join(workflow.name for workflow in registered.workflows)
        raise InvalidRequestError(f"Invalid '--workflow': {path} has several, {names}; give a file with one of them.")
    return registered.workflows[0], registered.classes


def given_inputs(workflow: Workflow, words: Sequence[str]) -> dict[str, ClassInput]:
    """The inputs that are given. words: ``name=value`` each; a picture is ``name=@file``, a tensor ``name=@file.npy``.
    Raises InvalidRequestError that names the input.
    """
    own, found = OwnFields.of(workflow), dict[str, ClassInput]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"Invalid '--input {word}': give NAME=VALUE, or NAME=@FILE.", param=name)
        if name in found:
            raise InvalidRequestError(f"Invalid '{name}': given more than once.", param=name)
        port = port_of(own.ports, name)
        if port is None or name in own.fields:
            value = own.fields[name].from_text(text) if port is not None else text
            assert isinstance(value, bool | int | float | str), "fields of inputs are scalars"
            found[name] = value
        else:
            found[name] = _file_of(port, text)
    return found


def _file_of(port: Port, text: str) -> ClassInput:
    """A picture's path, or a tensor."""
    if not text.startswith("@"):
        how = "@FILE" if port.type == "picture" else "@FILE.npy"
        raise InvalidRequestError(f"Invalid '{port.name}': it is a {port.form}; give {how}.", param=port.name)
    path = Path(text[1:])
    if port.type == "picture":
        return path
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidRequestError(f"Invalid '{port.name}': cannot read {path}: {error}.", param=port.name) from error
    if not isinstance(loaded, np.ndarray):
        raise InvalidRequestError(f"Invalid '{port.name}': {path} is no .npy file of an array.", param=port.name)
    return loaded


def places_of(workflow: Workflow, output: Path | None) -> dict[str, Path]:
    """Result -> the file that it is written to: the first picture to `output`, which may be missing if there are no
    files; further pictures, and tensors (.npy), beside it, with their name. Raises InvalidRequestError.
    """
    own = [(port.name, port.type) for port in workflow.own_results if port.type in ("picture", "tensor")]
    results = [("picture", "picture"), *own] if workflow.is_for_pictures else own
    if results and output is None:
        names = ", ".join(name for name, _ in results)
        raise InvalidRequestError(f"Missing '--output': the workflow makes {names}; say where to write.")
    pictures = sorted((name for name, kind in results if kind == "picture"), key="picture".__ne__)
    found = dict[str, Path]()
    for name, kind in results:
        assert output is not None, "it was asked for"
        suffix = ".npy" if kind == "tensor" else output.suffix
        found[name] = output if name in pictures[:1] else output.with_name(f"{output.stem}-{name}{suffix}")
    return found
