"""Runs the op run: a user's class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from core.errors import RunError
from core.graph.form import Form
from core.graph.op import Port
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.run import Run
from model_executor.device_failures import is_out_of_memory, wait_for_device
from model_executor.worker.ops.context import WorkerContext

_SCALARS: dict[str, tuple[type, ...]] = {"truth": (bool,), "integer": (int,), "number": (float, int)}
"""Kind of a form -> types of what a class returns for it."""


def run(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Have a class make the outputs of one item. It gets copies, because what it is given is read again if the node
    is, and what it returns may be memory that it uses again.
    """
    (item,) = items
    work = item.work
    assert isinstance(work, Run)
    inputs = _inputs(context, item, work)
    with context.time_limits.of(item, context.classes.configs[item.model].seconds):
        made = _execute(context, item, inputs)
        values = _checked(item, work.makes, made)
        wait_for_device()
    for port, place in work.results.values():
        there = context.shared(place)
        there[: values[port].nbytes].copy_(_bytes_of(values[port]))
    shapes = {name: tuple(values[port].shape) for name, (port, _) in work.results.items()}
    return [ItemResult(item.request_id, item.node, context.put(item, values), shapes=shapes)]


def _inputs(context: WorkerContext, item: Item, work: Run) -> dict[str, object]:
    forms = {port.name: port.form for port in work.takes}
    arrays = {name: context.shared(array) for name, array in work.given.items()}
    arrays |= {ref.input: context.read(ref) for ref in item.inputs}
    return dict(work.literals) | {name: _given(context, forms[name], array) for name, array in arrays.items()}


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
    """What a class returns. Raises RunError for whatever it raises, but for a lack of memory."""
    try:
        return context.classes.of(item.model).execute(**inputs)
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        if isinstance(error, Exception) and is_out_of_memory(error):
            raise
        raise RunError.at(item.node, f"class {item.model} raised {type(error).__name__}: {error}") from error


def _checked(item: Item, makes: Sequence[Port], made: object) -> dict[str, Tensor]:
    """The outputs as arrays. Raises RunError that says which of them is not as it is declared."""
    if not isinstance(made, Mapping):
        raise RunError.at(item.node, f"class {item.model} returned {type(made).__name__}, and a dict of outputs is due")
    wanted = [port.name for port in makes]
    if problem := next((f"lacks its output {name}" for name in wanted if name not in made), ""):
        raise RunError.at(item.node, f"what class {item.model} returned {problem}")
    if unknown := next((name for name in made if name not in wanted), None):
        raise RunError.at(item.node, f"class {item.model} returned {unknown!r}, and {', '.join(wanted)} are declared")
    return {port.name: _array(item, port, made[port.name]) for port in makes}


def _array(item: Item, port: Port, value: object) -> Tensor:
    assert port.form is not None, "check_workflow lets no port pass without a form"
    form, where = port.form, f"output {port.name} of class {item.model}"
    array = value if isinstance(value, Tensor) and form.kind in ("picture", "tensor") else _plain(form, value)
    if array is None or array.layout is not torch.strided:
        raise RunError.at(item.node, f"{where}: it is a {type(value).__name__}, and {form} is declared")
    if problem := form.why_not(array.shape, str(array.dtype).removeprefix("torch.")):
        raise RunError.at(item.node, f"{where}: {problem}")
    if array.is_floating_point() and not bool(torch.isfinite(array).all()):
        raise RunError.at(item.node, f"{where}: not all of its numbers are finite")
    return array.detach().clone(memory_format=torch.contiguous_format)


def _plain(form: Form, value: object) -> Tensor | None:
    """Text or a number as an array; None: it is neither, or not of this form."""
    if form.kind == "text" and isinstance(value, str):
        return torch.from_numpy(np.frombuffer(value.encode(errors="replace"), np.uint8).copy())
    if not isinstance(value, _SCALARS.get(form.kind, ())) or (isinstance(value, bool) and form.kind != "truth"):
        return None
    try:
        return torch.tensor(value, dtype=getattr(torch, form.dtype))
    except (OverflowError, RuntimeError):  # an int beyond 64 bits
        return None


def _bytes_of(array: Tensor) -> Tensor:
    return array.cpu().reshape(-1).view(torch.uint8)
