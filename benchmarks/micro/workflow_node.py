"""Overhead of a node of a user's class against calling the class directly.

A workflow of some nodes in a row, each of which reads what the one before has made, against one of a single node: what
each further node takes, on one engine with one worker, less what the class takes when it is called in this process. The
class adds a number to a vector of 1,024 numbers, or to a picture of 512 x 512 px. Workflows take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import command
from benchmarks.report import Value, percentile, print_report
from benchmarks.turns import in_turns, timed
from entrypoints import ImageEngine

SIDE = 512  # of the picture

FILE = """
from entrypoints.workflows import Model, Workflow, picture, tensor

class Add(Model):
    def setup_io(self):
        self.add_input("x", KIND)
        self.add_output("x", KIND)

    def load(self, device, dtype):
        pass

    def execute(self, x):
        return {"x": x + 1}

for number in (1, LENGTH):
    workflow = globals()[f"of_{number}"] = Workflow(name=f"NAME_{number}")
    x = workflow.add_input("x", KIND)
    for _ in range(number):
        x = Add()(x)
    workflow.add_output(x, name="x")
"""

KINDS: dict[str, tuple[str, np.typing.NDArray[Any]]] = {
    "vector": ('tensor("float32", 1024)', np.zeros(1024, np.float32)),
    "picture": (f"picture({SIDE}, {SIDE})", np.zeros((SIDE, SIDE, 3), np.uint8)),
}
"""Name -> (how the language calls it, the value)."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, rounds=40)
    parser.add_argument("--nodes", type=int, default=33, help="nodes in a row")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # as the worker has
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "workflow_node", "nodes": args.nodes})
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, _) in KINDS.items():
            text = FILE.replace("KIND", kind).replace("LENGTH", str(args.nodes)).replace("NAME", name)
            (Path(folder) / f"{name}.py").write_text(text)
        with ImageEngine(threads=1, workflows=[folder]) as engine:
            for name in KINDS:
                overheads = measure(engine, name, args.nodes, args.rounds)
                median, p99 = statistics.median(overheads), percentile(overheads, 0.99)
                rows.append((name, f"median {1e3 * median:.2f} ms, P99 {1e3 * p99:.2f} ms"))
                result |= {f"{name}_ms": 1e3 * median, f"{name}_p99_ms": 1e3 * p99}
    print_report("overhead of a node of a user's class", rows, result, args.output)


def measure(engine: ImageEngine, name: str, num_nodes: int, rounds: int) -> list[float]:
    """Seconds that a node takes beyond its class, by round."""
    value = KINDS[name][1]

    def run(number: int) -> Callable[[], float]:
        def call() -> None:
            (result,) = engine.generate([{"x": value}], model=f"{name}_{number}", use_tqdm=False)
            assert result.error is None, result.error

        return timed(call)

    x = torch.from_numpy(value)
    ways = {"one": run(1), "many": run(num_nodes), "direct": timed(lambda: x + 1)}
    seconds = in_turns(ways, rounds, warm_ups=3)
    direct = statistics.median(seconds["direct"])
    return [(many - one) / (num_nodes - 1) - direct for one, many in zip(seconds["one"], seconds["many"], strict=True)]


if __name__ == "__main__":
    main()
