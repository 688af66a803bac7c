"""The parts of a sweep."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.baselines.systems import Setting, running
from benchmarks.benchmark_serving import as_json, measure
from benchmarks.evidence.fleet import Fleet
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.results import Result, Results, run_command
from benchmarks.evidence.serving_part import ServingPart
from benchmarks.evidence.steps_part import StepsPart
from benchmarks.load.client import Target, send_in_turn, warm_up
from benchmarks.load.dataset import Mix, synthetic
from benchmarks.load.summary import Context
from benchmarks.micro.large_checkpoint import SIDE, write_checkpoint
from core.config import EMBEDDED_MODEL

SETTING = Setting(EMBEDDED_MODEL)
CLIENTS = 16


@dataclass(frozen=True)
class Sweep:
    """docs: folder for the pictures that parts make."""

    plan: Plan
    results: Results
    docs: Path

    def command(self, name: str, module: str, *flags: str) -> Result:
        """A command's result, kept under `name`."""
        return self.results.get_or_make(name, lambda: run_command(module, *flags))


def serving(sweep: Sweep) -> None:
    with Fleet(SETTING) as fleet:
        ServingPart(fleet, sweep.plan, sweep.results).run()


def steps(sweep: Sweep) -> None:
    """Edits of many steps that leave some out."""
    with Fleet(SETTING) as fleet:
        StepsPart(fleet, sweep.plan, sweep.results, sweep.docs).run()


def mask_ratio(sweep: Sweep) -> None:
    sweep.command("mask-ratio/step", "benchmarks.micro.denoiser_step", "--rounds", "3", "--skip-batch")
    ratios = ["0.05", "0.1", "0.2", "0.35", "0.5", "0.75"]
    flags = ["--mask-ratio", *ratios, "--steps", str(sweep.plan.many_steps), "--rounds", "2"]
    sweep.command("mask-ratio/edit", "benchmarks.serving.latency", *flags)


def fleet(sweep: Sweep) -> None:
    """Simulated engines: one edit at a time, against Stencil at the same rate."""
    for scenario, policy in {"one-at-a-time": "least-requests", "same-rate": "mask-aware"}.items():
        flags = ["--scenarios", scenario, "--seeds", "1", "--policies", policy]
        sweep.command(f"fleet/{scenario}", "benchmarks.simulation", *flags)


def cost_model(sweep: Sweep) -> None:
    sweep.command("cost-model", "benchmarks.micro.cost_model", "--num-batches", "150")


def overheads(sweep: Sweep) -> None:
    sweep.command("overheads/step-and-handover", "benchmarks.micro.overheads")
    sweep.command("overheads/routing", "benchmarks.micro.router_decision", "--scenarios", "decision-8")


def quality(sweep: Sweep) -> None:
    flags = ["--num-edits", str(sweep.plan.quality_edits // 2), "--steps", str(sweep.plan.steps)]
    sweep.command("quality", "benchmarks.quality", "systems", *flags, "--sheets", str(sweep.docs))


def large(sweep: Sweep) -> None:
    """512 px edits of a checkpoint whose time goes into tokens."""
    mix = Mix(template_reuse="fixed:4", num_inference_steps=str(sweep.plan.steps), sizes=f"{SIDE}x{SIDE}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"

        def make(name: str, number: int, warm_ups: int) -> Result:
            if not path.exists():
                write_checkpoint(path)
            return _closed_loop(name, Setting(str(path)), mix, number, warm_ups)

        number = sweep.plan.large_edits
        sweep.results.get_or_make("large/diffusers", lambda: make("diffusers", number, 1))
        sweep.results.get_or_make("large/stencil", lambda: make("stencil", 4 * number, 4))  # all templates are primed


def _closed_loop(name: str, setting: Setting, mix: Mix, number: int, warm_ups: int) -> Result:
    calls = synthetic(mix, warm_ups + number, np.random.default_rng(0))
    print(f"{name}, {mix.sizes}", flush=True)
    with running(name, setting) as server:
        target = Target(server.url)
        asyncio.run(warm_up(target, calls[:warm_ups], CLIENTS))
        sending = send_in_turn(target, calls[warm_ups:], CLIENTS)
        return {"system": name} | as_json(asyncio.run(measure(target, calls[warm_ups:], sending, Context())))


@dataclass(frozen=True)
class Part:
    """minutes: about how long it takes on 2 idle cores."""

    run: Callable[[Sweep], None]
    minutes: float


PARTS = {
    "overheads": Part(overheads, 0.2),
    "cost-model": Part(cost_model, 0.6),
    "mask-ratio": Part(mask_ratio, 2.2),
    "fleet": Part(fleet, 0.4),
    "quality": Part(quality, 6.0),
    "large": Part(large, 1.8),
    "serving": Part(serving, 25.0),
    "steps": Part(steps, 10.0),
}
