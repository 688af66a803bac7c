"""Classes of a user for tests, which workers import, and what their workflows make in this process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.graph.workflow import Workflow


class Mixer:
    """Sums two vectors, of which the second may be missing."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.weight = torch.ones(4, dtype=dtype, device=device)

    def execute(self, a: Tensor, b: Tensor | None = None, scale: float = 1.0) -> dict[str, object]:
        length = min(len(a), 16 if b is None else len(b))
        mixed = a[:length] * scale + (0 if b is None else b[:length]) * self.weight[0]
        a.zero_()  # a class may spoil what it is given
        return {"y": mixed, "mean": float(mixed.mean())}


class Shouter:
    """Upper case, and the number of characters."""

    def load(self, device: str, dtype: torch.dtype) -> int:
        return 1000

    def execute(self, words: str, times: int = 1) -> dict[str, object]:
        copies = 1 + abs(times) % 3
        return {"y": words.upper()[: 40 // copies] * copies, "count": len(words)}


class Inverter:
    """The negative of a picture, and its mean by channel."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.result = torch.empty(0)

    def execute(self, image: Tensor, flip: bool = False) -> dict[str, object]:
        self.result = 255 - (image.flip(1) if flip else image)  # the same memory as what it has returned
        return {"y": self.result, "means": self.result.float().mean((0, 1))}


class Panic(BaseException):
    """As bindings of Rust raise it."""


class Unreadable(dict[str, object]):
    def __getitem__(self, name: str) -> object:
        raise KeyError("it is gone")


class Wayward:
    """Does as it is told."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        pass

    def execute(self, how: str) -> object:
        if how.startswith("sleep"):
            time.sleep(float(how.removeprefix("sleep")))
        if how == "exit":
            raise SystemExit(3)
        if how == "panic":
            raise Panic("unwrap on None")
        if how == "raise":
            raise ValueError("it will not")
        made: dict[str, object] = {
            "shape": {"y": torch.zeros(17)},
            "sides": {"y": torch.zeros(2, 2)},
            "dtype": {"y": torch.zeros(4, dtype=torch.float64)},
            "finite": {"y": torch.tensor([1.0, float("nan")])},
            "type": {"y": [1.0]},
            "sparse": {"y": torch.ones(4).to_sparse()},
            "meta": {"y": torch.zeros(4, device="meta")},
            "nested": {"y": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])},
            "gone": Unreadable(y=torch.zeros(4)),
            "name": {"z": torch.zeros(4)},
            "more": {"y": torch.zeros(4), "z": 1},
            "none": {},
            "list": [torch.zeros(4)],
        }
        return made.get(how, {"y": torch.ones(4)}) if how != "nothing" else None


class Teller:
    """Tells of which type the number is that it gets."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        pass

    def execute(self, how: str, number: float) -> dict[str, object]:
        counts: dict[str, object] = {"beyond": 2**63, "truth": True, "most": 2**63 - 1}
        return {"count": counts.get(how, 1), "type": "\ud800" if how == "surrogate" else type(number).__name__}


class Sleeper:
    """Takes long to load."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        time.sleep(20)

    def execute(self) -> dict[str, object]:
        return {}


class Guard:
    """Blacks out pictures of which the prompt says that they are bad, and puts a stamp in the middle of others. It may
    take its time, return another size, raise, end its process, or wait, but only once: the prompt ends with the path of
    a file that it makes then.
    """

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.black = torch.zeros((), dtype=torch.uint8, device=device)

    def execute(
        self, image: Tensor, words: str, strictness: float = 1.0, stamp: Tensor | None = None
    ) -> dict[str, object]:
        if stamp is not None:
            top, left = ((side - part) // 2 for side, part in zip(image.shape, stamp.shape[:2], strict=False))
            image[top : top + stamp.shape[0], left : left + stamp.shape[1]] = stamp
        if "slow" in words:
            time.sleep(0.3)
        if "wait" in words and not (told := Path(words.split()[-1])).exists():
            told.touch()
            time.sleep(60)
        if "raise" in words:
            raise ValueError("it will not")
        if "deadly" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if "large" in words:
            image = image.repeat(2, 1, 1)[: len(image) + 8]
        is_bad = "bad" in words and strictness > 0
        return {"image": image * self.black if is_bad else image, "is_bad": is_bad, "mean": float(image.float().mean())}


class Broken:
    """Cannot be loaded."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        raise OSError("its file is gone")

    def execute(self) -> dict[str, object]:
        return {}


def alone(workflow: Workflow, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the classes make of these inputs, called one after the other in this process."""
    types = {"mixer": Mixer, "shouter": Shouter, "inverter": Inverter}
    made: dict[tuple[str, str], Any] = {}
    for node in workflow.nodes:
        each: Any = types[node.role]()
        each.load("cpu", torch.float32)
        values = dict(node.literals) | {name: inputs[source] for name, source in node.given.items()}
        values |= {edge.input: made[edge.source, edge.name] for edge in node.inputs}
        taken = {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        for name, value in each.execute(**taken).items():
            made[node.name, name] = value.numpy().copy() if isinstance(value, Tensor) else value
    return {name: made[maker, workflow.output_ports[name]] for name, maker in workflow.outputs.items()}


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, bit for bit."""
    if isinstance(one, np.ndarray):
        return bool(isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other))
    return type(one) is type(other) and one == other
