"""Edits through a workflow that says, in the language of workflows, what the shipped one says, against the shipped one.

Two served models of one checkpoint, which differ in their workflow alone, on one server. Both get the same edits in
turns, by one client and by eight, in an eighth of the rounds, and must answer one client with the same bytes. Processor
time is that of all processes of the server; on a busy machine it says more than latency.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.process_tree import cpu_seconds
from benchmarks.load.server import Server, ready_server
from benchmarks.report import Value, print_report
from benchmarks.turns import in_turns, median_ratio
from core.config import EMBEDDED_MODEL

SHIPPED, WRITTEN = "shipped", "written"
CLIENTS = 8

FILE = """
from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.families import VAE, Denoiser, LatentsGenerator, TextEncoder, denoise

workflow = Workflow(name="written")
picture, mask = (workflow.add_input(name, Image, required=False) for name in ("image", "mask"))
latents = LatentsGenerator()(workflow.add_input("seed", int), picture, mask)
prompt_embeds = TextEncoder()(workflow.add_input("prompt", str))
denoiser = Denoiser()
for _ in steps(workflow.add_input("num_inference_steps", int)):
    latents = denoise(denoiser(latents, prompt_embeds), latents)
workflow.add_output(VAE()(latents, mode="decode"), name="picture")
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=60)
    args = parser.parse_args(argv)
    mix = Mix(template_reuse="fixed:4", num_inference_steps=str(args.steps))
    calls = synthetic(mix, CLIENTS, np.random.default_rng(0))
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "written_workflow", "steps": args.steps})
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dtype", args.dtype, "--threads", str(args.threads), *write(Path(folder), args.model)]
        with ready_server(flags) as server:
            for clients in (1, CLIENTS):
                seconds, busy = measure(server, calls, clients, -(-args.rounds // clients))
                processor = busy[WRITTEN] / busy[SHIPPED]
                medians = {model: statistics.median(each) / clients for model, each in seconds.items()}
                ratio = median_ratio(seconds[WRITTEN], seconds[SHIPPED])
                told = ", ".join(f"{model} {1e3 * median:.1f} ms" for model, median in medians.items())
                rows.append(
                    (
                        f"an edit with {clients} at a time",
                        f"{told}; ratio {ratio:.3f}, of processor time {processor:.3f}",
                    )
                )
                result |= {f"{model}_{clients}_s": median for model, median in medians.items()}
                result |= {f"x_shipped_{clients}": ratio, f"x_shipped_processor_{clients}": processor}
    print_report(f"the shipped workflow, written by a user: {args.steps} steps", rows, result, args.output)


def measure(
    server: Server, calls: Sequence[EditCall], clients: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(seconds of a turn by model, in each of which as many edits are sent as there are clients; seconds of processor
    time of all of them by model). Raises AssertionError where an edit alone has two pictures.
    """
    busy = {SHIPPED: 0.0, WRITTEN: 0.0}
    digests: dict[str, list[str]] = {SHIPPED: [], WRITTEN: []}

    def turns_of(model: str) -> Callable[[], float]:
        edits = cycle(calls)

        def turn() -> float:
            before = cpu_seconds(server.process.pid)
            run = asyncio.run(warm_up(Target(server.url, model), list(islice(edits, clients)), clients))
            busy[model] += cpu_seconds(server.process.pid) - before
            digests[model] += [outcome.digest for outcome in run.outcomes]
            return run.seconds

        return turn

    seconds = in_turns({model: turns_of(model) for model in digests}, rounds, warm_ups=len(calls) // clients)
    assert clients > 1 or digests[WRITTEN] == digests[SHIPPED], "the workflows make different pictures"
    return seconds, busy


def write(folder: Path, model: str) -> list[str]:
    """A catalog of both models, and the file of the workflow; the flags that name them."""
    (folder / "written.py").write_text(FILE)
    entries = [f'[[model]]\nname = "{name}"\npath = "{model}"\n' for name in (SHIPPED, WRITTEN)]
    (folder / "catalog.toml").write_text("".join(entries) + f'workflow = "{WRITTEN}"\n')
    return ["--catalog", str(folder / "catalog.toml"), "--workflow", str(folder / "written.py")]


if __name__ == "__main__":
    main()
