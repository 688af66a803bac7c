"""Edits of many steps, some of which are left out: the speed of Stencil's calibrated schedule, and of diffusers' ways.

`benchmarks.quality step-skipping` says how close each way comes to edits with all steps, and how long a lone edit
takes. Those of diffusers that come as close as Stencil's calibrated schedule, or closer, are measured as servers: the
fastest first-block cache, the fastest of all, and all steps and the same noise levels besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence.fleet import Fleet, Load
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.results import Result, Results, run_command
from benchmarks.load.dataset import Mix

CALIBRATED = "stencil-calibrated"  # name of a way
ALL_STEPS, SAME_LEVELS = "all steps", "the same noise levels"
DIFFUSERS = {"diffusers": "one at a time", "diffusers-batch": "static batches of 8"}
"""Systems that serve each way of diffusers, and their words in its label."""


@dataclass(frozen=True)
class Way:
    """label: in the table. system: that serves it. fields: of every edit. facts: of the table, about held-out edits."""

    name: str
    label: str
    system: str
    fields: Mapping[str, Any]
    facts: Result


class StepsPart:
    """Measures what `results` lacks, the ways in turns."""

    def __init__(self, fleet: Fleet, plan: Plan, results: Results, docs: Path) -> None:
        """docs: folder of the plot."""
        self._fleet = fleet
        self._docs = docs
        self._plan = plan
        self._results = results

    def run(self) -> None:
        (line,) = self._results.get_or_make("steps/quality", self._compare)["lines"]
        found = ways(line)
        for number in range(self._plan.steps_rounds):
            for way in found[:: 1 if number % 2 == 0 else -1]:
                self._serve(way, number)

    def _compare(self) -> Result:
        flags = ["--steps", str(self._plan.many_steps), "--num-edits", str(self._plan.steps_quality_edits)]
        return run_command(
            "benchmarks.quality", "step-skipping", *flags, "--plot", str(self._docs / "frontier_box.svg")
        )

    def _serve(self, way: Way, number: int) -> None:
        plan, name = self._plan, f"steps/round-{number}-{way.name}"
        mix = Mix(num_inference_steps=str(plan.many_steps))
        edits = plan.number_of(way.system, plan.steps_edits)
        load = Load(name, mix, plan.warm_ups, edits, plan.steps_clients, seed=number)

        def make() -> Result:
            print(f"steps: {name}", flush=True)
            target = replace(self._fleet.target(way.system), extra=way.fields)
            facts = {"way": way.name, "label": way.label, "round": number}
            return facts | way.facts | load.closed_loop(target)

        self._results.get_or_make(name, make)


def ways(line: Result) -> list[Way]:
    """Those to serve. line: what `benchmarks.quality step-skipping` found."""
    calibrated = line["calibrated"]
    all_steps, same_levels, whole, ours = (
        next(one for one in line["ways"] if one["family"] == family and one["computed"] == computed)
        for family in ("diffusers, schedule", "Stencil, schedule")
        for computed in (None, calibrated)
    )
    theirs = [one for one in line["ways"] if one["family"].startswith("diffusers")]
    close = [one for one in theirs if one["ssim_mean"] >= ours["ssim_mean"]]
    caches = [one for one in close if one["first_block_cache"] is not None]
    fastest = [min(some, key=lambda one: one["seconds"]) for some in (caches, close) if some]
    chosen = {_words(one, calibrated): one for one in (all_steps, same_levels, *fastest)}
    return [
        *(_by_diffusers(words, one, system) for words, one in chosen.items() for system in DIFFUSERS),
        Way("stencil", "Stencil", "stencil", {}, _facts(whole)),
        Way(CALIBRATED, "Stencil, calibrated schedule", "stencil", {"step_schedule": "calibrated"}, _facts(ours)),
    ]


def _words(one: Result, calibrated: list[int]) -> str:
    if one["first_block_cache"] is not None:
        return f"first-block cache {one['first_block_cache']:g}"
    if one["num_inference_steps"] is not None:
        return f"{one['num_inference_steps']} even steps"
    if one["computed"] is None:
        return ALL_STEPS
    return SAME_LEVELS if one["computed"] == calibrated else f"{len(one['computed'])} noise levels"


def _by_diffusers(words: str, one: Result, system: str) -> Way:
    names = {"computed": "computed_steps"}
    fields = {names.get(name, name): one[name] for name in ("computed", "first_block_cache", "num_inference_steps")}
    given = {name: value for name, value in fields.items() if value is not None}
    name = f"{system}-{words.replace(' ', '-')}"
    return Way(name, f"diffusers, {words}, {DIFFUSERS[system]}", system, given, _facts(one) | {"levels": words})


def _facts(one: Result) -> Result:
    return {name: one[name] for name in ("steps", "ssim_mean", "ssim_p10")}
