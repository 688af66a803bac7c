"""Stands in for CUDA graphs on a CPU: records every operator and every interpreted Triton kernel of a pass, and runs
them again on the same tensors. Python code does not run again, so what it decided, and the numbers it passed, stay as
they were: as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

FAILED = float("nan")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class SimulatedGraph(TorchDispatchMode):
    """Recorded work. read: tensors that it reads and has not made itself, which must stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        self.num_replays = 0
        self._steps: list[Callable[[], None]] = []
        self._made = dict[int, Tensor]()  # storage -> a tensor that keeps it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note(args, kwargs)
        out = func(*args, **kwargs)
        mine = _tensors(out)
        known = {storage(x) for x in _tensors((args, kwargs))}
        self._made |= {storage(x): x for x in mine if storage(x) not in known}
        self._steps.append(lambda: _run_again(func, args, kwargs, mine))
        return out

    def launch(self, run: Callable[[], None], args: Any) -> None:
        """Run a kernel now, and at every replay."""
        self._note(args, {})
        with _disable_current_modes():
            run()
        self._steps.append(run)

    def replay(self) -> None:
        self.num_replays += 1
        for step in self._steps:
            step()

    def _note(self, args: Any, kwargs: Any) -> None:
        inputs = _tensors((args, kwargs))
        self.read += [x for x in inputs if storage(x) not in self._made and not x.is_meta]


def _run_again(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    for mine, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
        if new.data_ptr() != mine.data_ptr():
            mine.copy_(new)


@contextmanager
def _kernels_recorded(graph: SimulatedGraph) -> Iterator[None]:
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph.launch(lambda: original(self, *args, **kwargs), args)

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = original


class SimulatedCapture:
    """As `CudaCapture`: the work does not run at the capture, so its outputs hold nothing yet."""

    def __init__(self) -> None:
        self.graphs: list[SimulatedGraph] = []
        self.taken_bytes, self.is_broken = 0, False

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[SimulatedGraph, list[Tensor]]:
        graph = SimulatedGraph()
        with _kernels_recorded(graph), graph:
            outputs = run()
        for output in outputs:
            output.fill_(FAILED)
        self.graphs.append(graph)
        return graph, outputs

    def forget(self) -> None:
        self.taken_bytes = 0


def owned_by(thing: Any) -> dict[int, Tensor]:
    """All tensors that an object refers to, by storage: in attributes, containers and modules."""
    found, seen, left = dict[int, Tensor](), set[int](), [thing]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found[storage(each)] = each
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            left += each
        elif isinstance(each, torch.nn.Module):
            left += [*each.parameters(), *each.buffers()]
        elif type(each).__module__.startswith(("model_executor", "functools")):
            left += [getattr(each, name) for name in _slots(each) if hasattr(each, name)]
            left += list(getattr(each, "__dict__", {}).values())
    return found


def _slots(thing: Any) -> list[str]:
    return [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
