"""Classes of a user for tests, whose workers import them, and random workflows of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.graph.form import INTEGER, NUMBER, TRUTH, Form, picture, tensor, text
from core.graph.op import Port
from core.graph.workflow import Edge, Node, Workflow
from core.run_class import RunClass

VECTOR, PICTURE, TEXT = tensor("float32", 16), picture(8, 8), text(64)


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
        return {"y": words.upper()[: 60 // times] * times, "count": len(words)}


class Inverter:
    """The negative of a picture, and its mean by channel."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.result = torch.empty(0)

    def execute(self, image: Tensor, flip: bool = False) -> dict[str, object]:
        self.result = 255 - (image.flip(1) if flip else image)  # the same memory as what it has returned
        return {"y": self.result, "means": self.result.float().mean((0, 1))}


class Wayward:
    """Does as it is told."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        pass

    def execute(self, how: str) -> object:
        if how.startswith("sleep"):
            time.sleep(float(how.removeprefix("sleep")))
        if how == "raise":
            raise ValueError("it will not")
        made: dict[str, object] = {
            "shape": {"y": torch.zeros(17)},
            "sides": {"y": torch.zeros(2, 2)},
            "dtype": {"y": torch.zeros(4, dtype=torch.float64)},
            "finite": {"y": torch.tensor([1.0, float("nan")])},
            "type": {"y": [1.0]},
            "name": {"z": torch.zeros(4)},
            "more": {"y": torch.zeros(4), "z": 1},
            "none": {},
            "list": [torch.zeros(4)],
        }
        return made.get(how, {"y": torch.ones(4)}) if how != "nothing" else None


class Broken:
    """Cannot be loaded."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        raise OSError("its file is gone")

    def execute(self) -> dict[str, object]:
        return {}


CLASSES = tuple(
    RunClass(name=each.__name__.lower(), path=f"{__name__}:{each.__name__}")
    for each in (Mixer, Shouter, Inverter, Wayward, Broken)
)


def _node(
    name: str, role: str, takes: Mapping[str, Form], makes: Mapping[str, Form], optional: Sequence[str] = ()
) -> Node:
    ports = tuple(Port.of(each, form, is_optional=each in optional) for each, form in takes.items())
    return Node(name, "run", role=role, takes=ports, makes=tuple(Port.of(each, form) for each, form in makes.items()))


def mixer(name: str) -> Node:
    takes = {"a": VECTOR, "b": VECTOR, "scale": NUMBER}
    return _node(name, "mixer", takes, {"y": VECTOR, "mean": NUMBER}, optional=("b", "scale"))


def shouter(name: str) -> Node:
    return _node(name, "shouter", {"words": TEXT, "times": INTEGER}, {"y": TEXT, "count": INTEGER}, optional=("times",))


def inverter(name: str) -> Node:
    makes = {"y": PICTURE, "means": tensor("float32", 3)}
    return _node(name, "inverter", {"image": PICTURE, "flip": TRUTH}, makes, optional=("flip",))


WAYWARD = Workflow(
    "wayward",
    (replace(_node("does", "wayward", {"how": text(16)}, {"y": VECTOR}), given={"how": "how"}),),
    {"y": "does"},
    inputs=(Port.of("how", text(16)),),
    output_ports={"y": "y"},
)
BROKEN = Workflow("broken", (_node("never", "broken", {}, {"y": VECTOR}),), {"y": "never"}, output_ports={"y": "y"})

INPUTS = (Port.of("vector", VECTOR), Port.of("words", TEXT), Port.of("image", PICTURE))
LITERALS: dict[str, tuple[Any, ...]] = {"scale": (0.5, 2, -1.0), "times": (1, 3), "flip": (False, True)}


def random_workflow(random: Random, name: str, num_nodes: int) -> Workflow:
    """A graph of all three classes, in which every value of the right form may be read, and what is made at the end of
    each branch is a result.
    """
    made: list[tuple[Node, Port]] = []
    nodes: list[Node] = []
    for index in range(num_nodes):
        node = random.choice([mixer, mixer, shouter, inverter])(f"n{index}")
        node = _connected(random, node, made)
        nodes.append(node)
        made += [(node, port) for port in node.makes]
    read = {edge.source for node in nodes for edge in node.inputs}
    ends = [node for node in nodes if node.name not in read]
    results = {f"{node.name}_{port.name}": (node.name, port.name) for node in ends for port in node.makes}
    return Workflow(
        name,
        tuple(nodes),
        {result: maker for result, (maker, _) in results.items()},
        inputs=INPUTS,
        output_ports={result: port for result, (_, port) in results.items()},
    )


def _connected(random: Random, node: Node, made: Sequence[tuple[Node, Port]]) -> Node:
    edges: list[Edge] = []
    given: dict[str, str] = {}
    literals: dict[str, Any] = {}
    for port in node.takes:
        assert port.form is not None
        fitting = [
            (source.name, each.name)
            for source, each in made
            if each.form is not None and not port.form.why_not_from(each.form)
        ]
        sources = [each.name for each in INPUTS if each.form is not None and not port.form.why_not_from(each.form)]
        if port.is_optional and random.random() < 0.4:
            continue
        if fitting and (random.random() < 0.8 or not sources):
            source, value = random.choice(fitting)
            edges.append(Edge(source, value, port.name))
        elif sources:
            given[port.name] = random.choice(sources)
        else:
            literals[port.name] = random.choice(LITERALS[port.name])
    return replace(node, inputs=tuple(edges), given=given, literals=literals)


def random_inputs(random: Random) -> dict[str, Any]:
    rng = np.random.default_rng(random.randrange(1 << 30))
    return {
        "vector": rng.standard_normal(random.randint(3, 16)).astype(np.float32),
        "words": random.choice(["", "a red hat", "grüße", "x" * 40]),
        "image": rng.integers(0, 256, (random.randint(1, 8), random.randint(1, 8), 3), np.uint8),
    }


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
