"""A workflow of a user that takes tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoints.workflows import Model, Workflow, tensor

if TYPE_CHECKING:  # so that its import is fast
    import torch
    from torch import Tensor


class Sum(Model):
    """The sum of all numbers, and how many flags are set."""

    def setup_io(self) -> None:
        self.add_input("numbers", tensor("float64", 3, 65536))
        self.add_input("flags", tensor("bool", 4), required=False)
        self.add_output("sum", float)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, numbers: Tensor, flags: Tensor | None = None) -> dict[str, object]:
        return {"sum": float(numbers.sum()) + (0 if flags is None else int(flags.sum()))}


with Workflow(name="sum") as total:
    numbers = total.add_input("numbers", tensor("float64", 3, 65536))
    flags = total.add_input("flags", tensor("bool", 4), required=False)
    total.add_output(Sum()(numbers, flags), name="sum")
