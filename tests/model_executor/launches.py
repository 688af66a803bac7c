"""Counts what a pass would launch on a GPU, on a machine without one: tensors are on the meta device, and Triton's
kernels are replaced by stubs that note their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class LaunchCounter(TorchDispatchMode):
    """Within it, counts calls of PyTorch's operators on meta tensors, except those that only make views or empty
    tensors, and launches of `kernels`. An operator counts once, though PyTorch runs a few as several kernels.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()  # operator, or "triton." and kernel -> launches
        self.variants = set[Hashable]()  # of kernels, all that Triton would compile apart

    @property
    def total(self) -> int:
        return self.counts.total()

    def kernels(self, module: ModuleType) -> ModuleType:
        """A stand-in for a module of Triton kernels, whose launches are counted."""
        kernels = {name: value for name, value in vars(module).items() if hasattr(value, "arg_names")}
        return cast(ModuleType, SimpleNamespace(**{name: _Stub(name, each, self) for name, each in kernels.items()}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        output = func(*args, **(kwargs or {}))
        if name == "scaled_dot_product_attention":  # fused kernels keep the queries' order of memory
            output = torch.empty_like(args[0])
        inputs = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.device == META]
        is_new = any(leaf.numel() and _memory(leaf) not in inputs for leaf in outputs)
        if "empty" not in name and ((outputs and _writes(func)) or is_new):
            self.counts[name] += 1
        return output


class _Stub:
    """A Triton kernel that is not run."""

    def __init__(self, name: str, kernel: Any, counter: LaunchCounter) -> None:
        self._name, self._kernel, self._counter = name, kernel, counter
        options = getattr(kernel, "kwargs", None) or vars(kernel)  # of an interpreted one, else as Triton keeps them
        self._unspecialized = set(options["do_not_specialize"] or ())

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self._counter.counts[f"triton.{self._name}"] += 1
            named = zip(self._kernel.arg_names, args, strict=False)
            types = tuple(_specialised(value, name not in self._unspecialized) for name, value in named)
            self._counter.variants.add((self._name, types, *sorted((name, str(v)) for name, v in constants.items())))

        return launch


def _specialised(value: Any, is_specialized: bool) -> Hashable:
    """What Triton compiles a kernel for, of an argument: its type, whether it is a multiple of 16, and whether it is 1.
    A tensor's address counts as one from the begin of its memory, which is aligned."""
    if isinstance(value, Tensor):
        return value.dtype, value.storage_offset() * value.itemsize % 16 == 0
    if not isinstance(value, int):
        return type(value)
    size = "int32" if abs(value) < 2**31 else "int64"
    return (size, value % 16 == 0, value == 1) if is_specialized else size


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _writes(func: Any) -> bool:
    """Whether an operator changes an argument."""
    return bool(func._schema.is_mutable)
