"""Two workflows, with and without a ControlNet, on two ranks that share what they load, against each alone on its rank
(LegoDiffusion, figure 4 left).

Stable Diffusion 3's shape with its widths cut to a sixth, a third of its blocks, text encoders in proportion and a
ControlNet of half of its blocks; random weights. `shared`: one engine of two ranks. `alone`: two servers of one rank,
of which one has no ControlNet. All predict from the model's profile on this machine. Both get the same generations at
the same times, by Poisson processes at a share of what the rank of each workflow could do alone, in turns, and must
answer with the same pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from diffusers import SD3Transformer2DModel

from benchmarks.command import command
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Run, Target, checked, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, generations
from benchmarks.load.process_tree import pss_bytes
from benchmarks.load.server import ROOT, Server, ready_server
from benchmarks.load.workload import IMAGE
from benchmarks.report import print_report
from tools.random_checkpoints import make_sd3, sd3_transformer, t5_encoder, t5_tokenizer
from tools.random_controlnets import make_sd3_controlnet

SIDE = 256  # px
TEXT_WIDTH, TEXT_TOKENS = 512, 16
WIDTHS = {
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "caption_projection_dim": 256,
    "joint_attention_dim": TEXT_WIDTH,
}
NUM_BLOCKS = 8
TEXT_ENCODER = {"d_kv": 64, "d_ff": 1365, "num_layers": 16, "num_heads": 8}
"""2.6 times the transformer's weights."""

NAME = "sd3"
WORKFLOWS = ("plain", "controlled")
SETTLE_SECONDS = 10.0
"""In which idle ranks load what they have been told to, and prime."""


@dataclass(frozen=True)
class System:
    """A way to serve both workflows. targets: workflow -> where it is served."""

    servers: Sequence[Server]
    targets: Mapping[str, Target]

    @classmethod
    def start(cls, stack: ExitStack, folder: Path, threads: int, *, is_shared: bool) -> System:
        common = ["--dtype", "float32", "--threads", str(threads), "--no-playground"]

        def server(catalog: str, num_ranks: int) -> Server:
            flags = ["--catalog", str(folder / catalog), "--workers-per-engine", str(num_ranks)]
            return stack.enter_context(ready_server([*common, *flags]))

        servers = [server("controlled.toml", 2)] if is_shared else [server(f"{name}.toml", 1) for name in WORKFLOWS]
        own: dict[str, dict[str, Any]] = {"plain": {}, "controlled": {"control_image": _data_url(IMAGE)}}
        size = {"size": f"{SIDE}x{SIDE}"}
        of_each = zip(WORKFLOWS, (servers[0].url, servers[-1].url), strict=True)
        return cls(servers, {name: Target(url, extra=size | own[name]) for name, url in of_each})

    def send(self, calls: Sequence[EditCall], due: Mapping[str, Sequence[float]]) -> dict[str, Run]:
        """By workflow. due: seconds after the start. Raises WarmUpError if a request fails."""

        async def send_all() -> list[Run]:
            return await asyncio.gather(
                *(send_on_time(self.targets[name], calls, due[name]) for name in WORKFLOWS),
            )

        return dict(zip(WORKFLOWS, map(checked, asyncio.run(send_all())), strict=True))

    def alone(self, calls: Sequence[EditCall]) -> dict[str, float]:
        """Median seconds of a request with nothing beside it, by workflow, after those that fill caches."""
        found = {}
        for name in WORKFLOWS:
            asyncio.run(warm_up(self.targets[name], calls, 1))
            time.sleep(SETTLE_SECONDS)
            found[name] = statistics.median(asyncio.run(warm_up(self.targets[name], calls, 1)).latencies)
        time.sleep(SETTLE_SECONDS)
        return found

    def weights(self) -> tuple[int, int]:
        """Bytes of all loaded components: (each counted once for an engine, once for each rank that has it)."""
        once, by_rank = 0, 0
        for server in self.servers:
            for engine in httpx.get(f"{server.url}/v1/engine/stats").json()["engines"]:
                once += sum(each["bytes"] for each in engine["resident_models"])
                by_rank += sum(each["bytes"] for rank in engine["ranks"] for each in rank["resident_models"])
        return once, by_rank

    def pss(self) -> int:
        """Bytes of all processes."""
        return sum(pss_bytes(server.process.pid) for server in self.servers)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, threads=1, steps=8, rounds=2, seed=0, edits=24)
    parser.add_argument("--load", type=float, default=0.6, help="share of the time in which a rank alone would be busy")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_models(Path(folder))
        profile(Path(folder), args.threads)
        systems = {
            name: System.start(stack, Path(folder), args.threads, is_shared=name == "shared")
            for name in ("alone", "shared")
        }
        measure(systems, args)


def write_models(folder: Path) -> None:
    """Checkpoints and catalogs."""
    torch.manual_seed(0)
    make_sd3(folder / NAME, text_tokens=TEXT_TOKENS, dual_attention_layers=(), qk_norm=None, native_size=SIDE)
    base = sd3_transformer(64, 48, None, (), SIDE // 8)
    shape = dict(base.config) | WIDTHS | {"num_layers": NUM_BLOCKS}
    SD3Transformer2DModel.from_config(shape).save_pretrained(folder / NAME / "transformer")
    t5_encoder(t5_tokenizer(TEXT_TOKENS), TEXT_WIDTH, TEXT_ENCODER).save_pretrained(folder / NAME / "text_encoder_3")
    make_sd3_controlnet(folder / "net", num_layers=NUM_BLOCKS // 2, qk_norm=None, sample_size=SIDE // 8, **WIDTHS)
    model = f'[[model]]\nname = "{NAME}"\npath = "{NAME}"\n'
    (folder / "plain.toml").write_text(model)
    (folder / "controlled.toml").write_text(f'{model}controlnets = ["net"]\n[controlnets]\nnet = "net"\n')


def profile(folder: Path, threads: int) -> None:
    """Measure steps on one rank and on two."""
    flags = ["--model", str(folder / NAME), "--served-model-name", NAME, "--dtype", "float32"]
    flags += ["--threads", str(threads), "--max-num-seqs", "2", "--degrees", "1", "2"]
    subprocess.run([sys.executable, "-m", "model_executor.worker.probes.profiler", *flags], cwd=ROOT, check=True)


def measure(systems: Mapping[str, System], args: argparse.Namespace) -> None:
    mix = Mix(num_inference_steps=str(args.steps))
    calls = generations(mix, args.edits, np.random.default_rng(args.seed))
    lone = {name: system.alone(calls[:8]) for name, system in systems.items()}
    latencies: dict[str, dict[str, list[float]]] = {name: {each: [] for each in WORKFLOWS} for name in systems}
    for number in range(args.rounds):
        random = np.random.default_rng([args.seed, number])
        due = {
            name: due_times("poisson", args.edits, args.load / lone["alone"][name], 1.0, random) for name in WORKFLOWS
        }
        digests = set[tuple[str, ...]]()
        for name, system in systems.items():
            runs = system.send(calls, due)
            for workflow, run in runs.items():
                latencies[name][workflow] += run.latencies
            digests.add(tuple(outcome.digest for run in runs.values() for outcome in run.outcomes))
        assert len(digests) == 1, "pictures depend on what is shared"
    report(systems, lone, latencies, args)


def report(
    systems: Mapping[str, System],
    lone: Mapping[str, Mapping[str, float]],
    latencies: Mapping[str, Mapping[str, Sequence[float]]],
    args: argparse.Namespace,
) -> None:
    rows, result = list[tuple[str, str]](), dict[str, float | str]({"benchmark": "two_workflows", "load": args.load})
    for name, system in systems.items():
        of_each = {each: statistics.fmean(latencies[name][each]) for each in WORKFLOWS}
        once, by_rank = system.weights()
        result |= {f"{name}_{each}_s": seconds for each, seconds in of_each.items()}
        result |= {f"{name}_lone_{each}_s": seconds for each, seconds in lone[name].items()}
        result |= {
            f"{name}_mean_s": statistics.fmean(of_each.values()),
            f"{name}_weights_mb": once / 1e6,
            f"{name}_weights_by_rank_mb": by_rank / 1e6,
            f"{name}_pss_mb": system.pss() / 1e6,
        }
        told = ", ".join(f"{each} {of_each[each]:.2f} ({lone[name][each]:.2f} with nothing beside)" for each in of_each)
        rows.append((f"{name}, seconds", f"mean {result[f'{name}_mean_s']:.2f}; {told}"))
        memory = f"{once / 1e6:.0f}; each rank's own {by_rank / 1e6:.0f}; all processes {system.pss() / 1e6:.0f}"
        rows.append((f"{name}, MB of weights", memory))
    for key in ("mean_s", "weights_mb", "weights_by_rank_mb", "pss_mb"):
        change = float(result[f"shared_{key}"]) / float(result[f"alone_{key}"]) - 1
        result[f"change_{key.rpartition('_')[0]}"] = change
        rows.append((f"shared against alone, {key.rpartition('_')[0]}", f"{change:+.1%}"))
    print_report(f"{args.edits} of each workflow x {args.rounds} rounds, load {args.load:g}", rows, result, args.output)


def _data_url(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


if __name__ == "__main__":
    main()
