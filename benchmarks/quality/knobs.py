"""How close mask-aware edits come to exact ones: held-out edits of drawn scenes, same seeds, through ImageEngine.

Judges the default, then moves one knob at a time away from it. Prints Markdown (docs/quality.md holds a run) and last
the same figures as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.markdown import fill
from benchmarks.quality.edits import (
    OTHER_SEEDS,
    Likeness,
    Machine,
    Setting,
    add_options,
    lone_edit,
    num_changed_outside,
    pictures,
    run_edits,
)
from benchmarks.quality.masks import part_of_box
from benchmarks.quality.sheet import write_sheet
from core.model_info import ModelInfo
from entrypoints import ImageEngine
from entrypoints.calibration_search import describe_full_steps
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.sheet import masked_view

PAGE = Path(__file__).with_name("page.md")

BARS = {"mean": 0.98, "p10": 0.96, "points": 1.0}
WORST = 10
SCALE_EDITS = 48
"""Edits that run with another seed too, as the scale to read the rest by."""
TIMED_EDITS = 5
SCENES = {
    ("test", "silhouette"): seeds.TEST,
    ("test", "box"): seeds.TEST_BOXES,
    ("tuning", "silhouette"): seeds.TUNING,
    ("tuning", "box"): seeds.TUNING + 50_000,
}

KNOBS: dict[str, Sequence[Any]] = {
    "keyframes": ("2", "3", "5", "9", "per-step"),
    "dtype": ("int8", "bfloat16", "float32"),
    "margin": (0, 4, 8, 16),
    "full_steps": (0, 1, 2),
}
CHEAPEST = Setting("2", "int8", 0, 0)
DEAREST = Setting("per-step", "float32", 16, 2)


@dataclass(frozen=True)
class Outcome:
    """The model's default at one number of steps."""

    steps: int
    full_steps: int | None  # None: by the mask ratio
    likeness: Likeness
    other_seed: Likeness  # exact against exact with another seed, of the first SCALE_EDITS edits
    exact_colour: float  # accuracy, 0..1
    exact_pattern: float
    num_changed_outside: int
    exact: list[Pixels]
    aware: list[Pixels]

    @property
    def in_full(self) -> str:
        return "" if self.full_steps is None else f", {self.full_steps} in full"

    @property
    def is_within_bars(self) -> bool:
        like = self.likeness.figures
        is_close = like["mean"] >= BARS["mean"] and like["p10"] >= BARS["p10"]
        is_right = round(max(abs(like["colour"]), abs(like["pattern"])), 3) <= BARS["points"]
        return is_close and is_right and self.num_changed_outside == 0

    @property
    def figures(self) -> dict[str, Any]:
        names = ("steps", "full_steps", "exact_colour", "exact_pattern", "num_changed_outside", "is_within_bars")
        likeness = {"mask_aware": self.likeness.figures, "other_seed": self.other_seed.figures}
        return {name: getattr(self, name) for name in names} | likeness


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    machine = Machine(args.dtype, args.threads, args.priming_prompt, args.model)
    asked = _edits(args.scenes, args.masks, args.num_edits)
    with machine.engine(Setting()) as engine:
        outcomes = [one for steps in args.steps for one in _measure(engine, asked, steps, args.full_steps)]
        model = engine.model
    default = replace(shipped_setting(model), full_steps=args.full_steps[0])
    print(_heading(args, asked, model))
    for outcome in outcomes:
        print(_outcome_markdown(outcome), flush=True)
    if args.sheet is not None:
        _write_worst(asked, min(outcomes, key=lambda outcome: outcome.likeness.figures["mean"]), args.sheet)
    rows = list(_measure_rows(machine, asked[: args.table_edits], outcomes, default)) if args.table_edits else []
    if rows:
        print(_part("Table", rows=[_cells(row, default) for row in rows], num_edits=args.table_edits), flush=True)
    about = {name: getattr(args, name) for name in ("scenes", "masks", "dtype", "num_edits", "table_edits")}
    figures = {"default": asdict(default), "outcomes": [outcome.figures for outcome in outcomes], "table": rows}
    print(json.dumps({"benchmark": "quality"} | about | figures))


def _edits(scenes: str, masks: str, number: int) -> list[Case]:
    if masks == "part":
        return [part_of_box(case, seed) for seed, case in enumerate(_edits(scenes, "box", number))]
    return cases(SCENES[scenes, masks], number, "box" if masks == "box" else "silhouette")


def _measure(
    engine: ImageEngine, asked: Sequence[Case], steps: int, full_steps: Sequence[int | None]
) -> Iterator[Outcome]:
    exact, scaled = pictures(run_edits(engine, asked, steps)), asked[:SCALE_EDITS]
    other_seed = pictures(run_edits(engine, scaled, steps, first_seed=OTHER_SEEDS))
    other = Likeness.of(scaled, exact[: len(scaled)], other_seed)
    accuracy = score(exact, asked)
    for full in full_steps:
        aware = pictures(run_edits(engine, asked, steps, Setting(full_steps=full)))
        yield Outcome(
            steps=steps,
            full_steps=full,
            likeness=Likeness.of(asked, exact, aware),
            other_seed=other,
            exact_colour=accuracy.colour,
            exact_pattern=accuracy.pattern,
            num_changed_outside=num_changed_outside(asked, aware),
            exact=exact,
            aware=aware,
        )


def shipped_setting(model: ModelInfo) -> Setting:
    """What a server without flags uses for this model; full steps go by the mask ratio."""
    scheme = model.page_scheme
    if scheme is None:
        raise SystemExit("this model is served without mask-aware execution; there is nothing to compare")
    keyframes = str(len(scheme.keyframes)) if scheme.keyframes else "per-step"
    return Setting(keyframes, scheme.layout.dtype, scheme.mask_margin)


def settings_around(default: Setting) -> list[Setting]:
    """The default, its neighbours one knob at a time, and both ends; those of one engine lie together."""
    neighbours = [replace(default, **{knob: value}) for knob, values in KNOBS.items() for value in values]
    varied = dict.fromkeys([default, *neighbours, CHEAPEST, DEAREST])
    return sorted(varied, key=lambda setting: setting.server != default.server)


def _measure_rows(
    machine: Machine, asked: Sequence[Case], outcomes: Sequence[Outcome], default: Setting
) -> Iterator[dict[str, Any]]:
    exact = {outcome.steps: outcome.exact[: len(asked)] for outcome in outcomes}
    rows = []
    for _, group in groupby(settings_around(default), key=lambda setting: setting.server):
        alike = list(group)
        with machine.engine(alike[0]) as engine:
            rows += [_row(engine, asked, exact[steps], setting, steps) for setting in alike for steps in exact]
    yield from sorted(rows, key=lambda row: row["steps"])


def _row(
    engine: ImageEngine, asked: Sequence[Case], exact: Sequence[Pixels], setting: Setting, steps: int
) -> dict[str, Any]:
    """denoise_ratio, edit_ratio: of a lone warm edit's time, denoising alone and as its caller sees it, to the exact
    mode's. page_bytes: of one template."""
    results, scheme = run_edits(engine, asked, steps, setting), engine.model.page_scheme
    assert scheme is not None
    denoise_ratio, edit_ratio = _time(engine, asked[-TIMED_EDITS:], setting, steps)
    return {
        **asdict(setting),
        "steps": steps,
        **Likeness.of(asked, exact, pictures(results)).figures,
        "active_ratio": statistics.mean(result.reports[0].mask_ratio for result in results),
        "denoise_ratio": denoise_ratio,
        "edit_ratio": edit_ratio,
        "page_bytes": scheme.template_bytes(results[0].reports[0].image_tokens, len(scheme.keyframes) or steps),
    }


def _time(engine: ImageEngine, asked: Sequence[Case], setting: Setting, steps: int) -> tuple[float, float]:
    """Medians of mask-aware over exact, of lone edits in turn: (denoising, whole edit)."""
    edit = partial(lone_edit, engine, steps=steps)
    for case in asked:
        edit(case, setting=setting)  # so that its pages are there
    turns = [(edit(case, setting=None), edit(case, setting=setting)) for case in asked]
    denoise = [a.reports[0].ms["denoise"] / e.reports[0].ms["denoise"] for (_, e), (_, a) in turns]
    return statistics.median(denoise), statistics.median(aware_s / exact_s for (exact_s, _), (aware_s, _) in turns)


# ------------------------------------------------------------------------------------------------------- what is shown


def _part(title: str, **values: Any) -> str:
    """A section of the page, without its title."""
    return fill(PAGE.read_text(), values).removeprefix(f"# {title}\n\n")


def _heading(args: argparse.Namespace, asked: Sequence[Case], model: ModelInfo) -> str:
    scheme = model.page_scheme
    assert scheme is not None
    rules = [
        describe_full_steps(*((scheme.full_steps, scheme.full_steps_from) if full is None else (full, 0.0)))
        for full in args.full_steps
    ]
    default = {
        "number": len(asked),
        "scenes": args.scenes,
        "masks": args.masks,
        "area": float(np.mean([case.mask.mean() for case in asked])),
        "dtype": args.dtype,
        "setting": shipped_setting(model),
        "rules": "; ".join(rules),
        "prompt": f", primed with {args.priming_prompt!r}" if args.priming_prompt else "",
    }
    return _part("Default", default=default)


def _outcome_markdown(outcome: Outcome) -> str:
    return _part(
        "Outcome",
        outcome=outcome,
        aware=outcome.likeness.figures,
        other=outcome.other_seed.figures,
        deciles=" ".join(f"{value:.3f}" for value in np.percentile(outcome.likeness.in_box, range(0, 101, 10))),
        bars=BARS,
        verdict="yes" if outcome.is_within_bars else "no",
    )


def _cells(row: dict[str, Any], default: Setting) -> dict[str, Any]:
    """The default is bold."""
    is_default = Setting(*(row[name] for name in KNOBS)) == default
    full = "by ratio" if row["full_steps"] is None else row["full_steps"]
    return row | {"b": "**" if is_default else "", "full": full, "page_mb": row["page_bytes"] / 1e6}


def _write_worst(asked: Sequence[Case], outcome: Outcome, path: Path) -> None:
    """Input, mask, exact and mask-aware edit of those least alike, worst first."""
    rows = []
    for i in np.argsort(outcome.likeness.in_box)[:WORST]:
        pictures = asked[i].template, masked_view(asked[i]), outcome.exact[i], outcome.aware[i]
        ssim = f"SSIM in box {outcome.likeness.in_box[i]:.3f}"
        rows.append((pictures, f"“{asked[i].prompt}”   {ssim}   input, mask, exact, mask-aware"))
    write_sheet(path, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num-edits", type=int, default=200, help="edits that judge the default")
    parser.add_argument("--table-edits", type=int, default=48, help="edits of the table, the first ones; 0 = no table")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 28], help="denoising steps")
    parser.add_argument("--scenes", choices=("test", "tuning"), default="test", help="which held-out scenes")
    masks = ("silhouette", "box", "part")
    parser.add_argument("--masks", choices=masks, default=masks[0], help="a garment's outline, its box or part of that")
    parser.add_argument(
        "--full-steps", type=int, nargs="+", default=[None], help="of every edit; else by its mask ratio"
    )
    parser.add_argument("--priming-prompt", default="", help="prompt that templates are primed with")
    parser.add_argument("--sheet", type=Path, help="picture of the worst ten edits")
    add_options(parser)
    return parser.parse_args(argv)
