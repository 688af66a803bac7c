"""Workflows of a user that see no pictures: of a text, and a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoints.workflows import Model, Workflow, steps

if TYPE_CHECKING:  # so that its import is fast
    import torch


class Count(Model):
    """The number of characters."""

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_output("length", int)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, prompt: str) -> dict[str, object]:
        return {"length": len(prompt)}


class Add(Model):
    """Two more."""

    def setup_io(self) -> None:
        self.add_input("number", int)
        self.add_output("number", int)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, number: int) -> dict[str, object]:
        return {"number": number + 2}


with Workflow(name="length") as length:
    length.add_output(Count()(length.add_input("prompt", str)), name="length")

with Workflow(name="count") as counting:
    number, rounds = counting.add_input("number", int), counting.add_input("rounds", int)
    for _ in steps(rounds):
        number = Add()(number)
    counting.add_output(number, name="number")
