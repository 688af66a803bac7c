"""Runs the op run: a user's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import RunError
from core.graph.form import Form
from core.graph.op import Port
from core.graph.port_checks import CHOSEN
from core.graph.workflow import Literal
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.run import Run
from core.validation import shorten
from model_executor.device_failures import is_out_of_memory, wait_for_device
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.stores.user_classes import in_words


def run(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Have a class make the outputs of one item. It gets copies, because what it is given is read again if the node
    is, and what it returns may be memory that it uses again.
    """
    (item,) = items
    work = item.work
    assert isinstance(work, Run)
    inputs = _inputs(context, item, work)
    with context.time_limits.of(item, context.classes.configs[item.model]):
        made = _execute(context, item, inputs)
        values = _checked(item, work.makes, made)
        _check_picture(item, work, values)
        chosen = _chosen(item, work.readers, values) if work.readers else ""
        wait_for_device()
    for port, place in work.results.values():
        there = context.shared(place).reshape(-1)
        there[: values[port].nbytes].copy_(_bytes_of(values[port]))
    shapes = {name: tuple(values[port].shape) for name, (port, _) in work.results.items()}
    return [ItemResult(item.request_id, item.node, context.put(item, values), shapes=shapes, chosen=chosen)]


def _inputs(context: WorkerContext, item: Item, work: Run) -> dict[str, object]:
    forms = {port.name: port.form for port in work.takes}
    arrays = {name: context.shared(array) for name, array in work.given.items()}
    arrays |= {ref.input: context.read(ref) for ref in item.inputs}
    literals = {name: _constant(forms[name], value) for name, value in work.literals.items()}
    return literals | {name: _given(context, forms[name], array) for name, array in arrays.items()}


def _constant(form: Form | None, value: Literal) -> Literal:
    """What a class gets for a literal."""
    assert form is not None, "check_workflow lets no port pass without a form"
    return float(value) if form.kind == "number" else value


def _given(context: WorkerContext, form: Form | None, array: Tensor) -> object:
    """What a class gets for an array."""
    assert form is not None, "check_workflow lets no port pass without a form"
    match form.kind:
        case "truth" | "integer" | "number":
            return array.item()
        case "text":
            return array.cpu().numpy().tobytes().decode()
        case "picture" | "tensor":
            return array.to(context.device, copy=True)


def _execute(context: WorkerContext, item: Item, inputs: dict[str, object]) -> object:
    """What a class returns."""
    with _blamed(item, f"class {item.model} raised"):
        return context.classes.of(item.model).execute(**inputs)


def _checked(item: Item, makes: Sequence[Port], made: object) -> dict[str, Tensor]:
    """The outputs as arrays. Raises RunError that says which of them is not as it is declared."""
    with _blamed(item, f"what class {item.model} returned cannot be read:"):
        problem, values = _taken([port.name for port in makes], made)
    if problem:
        raise RunError.at(item.node, f"class {item.model} returned {problem}")
    return {port.name: _output(item, port, values[port.name]) for port in makes}


def _check_picture(item: Item, work: Run, values: Mapping[str, Tensor]) -> None:
    """Raises RunError for the picture of a request that is not of its size."""
    for port, place in work.results.values():
        if len(place.shape) == 3 and tuple(values[port].shape) != place.shape:
            (height, width, _), (own_height, own_width, _) = place.shape, values[port].shape
            problem = f"it is {own_width} x {own_height} px, and the request's picture {width} x {height} px"
            raise RunError.at(item.node, f"output {port} of class {item.model}: {problem}")


@contextmanager
def _blamed(item: Item, what: str) -> Iterator[None]:
    """Run what a user's class has made: whatever it raises becomes a RunError that names node and cause, but for a lack
    of memory. what: the cause, in words.
    """
    try:
        yield
    except BaseException as error:  # a user's class may raise anything; panics of Rust are no Exceptions
        if is_out_of_memory(error):
            raise
        raise RunError.at(item.node, f"{what} {in_words(error)}") from error


def _taken(wanted: Sequence[str], made: object) -> tuple[str, dict[str, object]]:
    """(what is wrong with what a class has returned, or ""; its outputs by name)"""
    if not isinstance(made, Mapping):
        return f"{type(made).__name__}, and a dict of outputs is due", {}
    if lacking := next((name for name in wanted if name not in made), ""):
        return f"what lacks its output {lacking}", {}
    for name in made:
        if name not in wanted:
            return f"{shorten(repr(name))}, and {', '.join(wanted)} are declared", {}
    return "", {name: made[name] for name in wanted}


def _output(item: Item, port: Port, value: object) -> Tensor:
    assert port.form is not None, "check_workflow lets no port pass without a form"
    form, where = port.form, f"output {port.name} of class {item.model}"
    with _blamed(item, f"{where} cannot be read:"):
        problem = form.why_not_plain(value) if form.is_plain else _why_not_array(form, value)
        if not problem:
            return _array(form, value)
    raise RunError.at(item.node, f"{where}: {problem}")


def _why_not_array(form: Form, value: object) -> str:
    """Why a value is no picture or tensor of a form; "": it is one."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"it is a {type(value).__name__}, and {form} is declared"
    if value.is_meta:
        return "it is on the device meta, where tensors have no content"
    if problem := form.why_not(value.shape, str(value.dtype).removeprefix("torch.")):
        return problem
    return (
        ""
        if not value.is_floating_point() or bool(torch.isfinite(value).all())
        else "not all of its numbers are finite"
    )


def _chosen(item: Item, readers: Sequence[str], values: dict[str, Tensor]) -> str:
    """The reader that runs. Raises RunError for a name that is none of them."""
    chosen = _bytes_of(values[CHOSEN]).numpy().tobytes().decode()
    if chosen not in readers:
        what = f"class {item.model} chose {shorten(repr(chosen))}, and {', '.join(readers)} read what it makes"
        raise RunError.at(item.node, what)
    return chosen


def _array(form: Form, value: Any) -> Tensor:
    """A copy of a value of a form."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, str):
        return torch.from_numpy(np.frombuffer(value.encode(), np.uint8).copy())
    return torch.tensor(value, dtype=getattr(torch, form.dtype))


def _bytes_of(array: Tensor) -> Tensor:
    return array.cpu().reshape(-1).view(torch.uint8)
