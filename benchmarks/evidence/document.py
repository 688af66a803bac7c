"""docs/benchmarks.md: prose and columns of tables from page.md, figures from files of results, then measuring.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.evidence.markdown import fill
from benchmarks.evidence.results import Result, Results
from benchmarks.evidence.steps_part import CALIBRATED, SAME_LEVELS
from benchmarks.turns import median_ratio

PAGE = Path(__file__).with_name("page.md")

RUNS = {"public_8": "public-8", "production_8": "flashps-prod-8", "public_28": "public-28"}
"""Columns and tables of throughput -> the names of their results."""

MEASURING = Path(__file__).with_name("measuring.md")
"""The end of the page: single runs and how to measure, written by hand."""

MEDIANS = ("request_rate", "latency_mean_ms", "latency_median_ms", "latency_p95_ms", "latency_p99_ms", "queue_mean_ms")


def write_document(results: Results, folder: Path) -> None:
    """The page; sections without results are left out."""
    values: dict[str, Any] = {}
    for section in (_throughput, _steps, _headline, _keep_up, _stages, _quality, _others):
        values |= section(results)
    filled = {name: value for name, value in values.items() if value}
    page = fill(PAGE.read_text(), filled) + "\n" + MEASURING.read_text()
    (folder / "benchmarks.md").write_text(page.rstrip() + "\n")


# ------------------------------------------------------------------------------------------------------------- serving


def _throughput(results: Results) -> dict[str, Any]:
    tables = {name: results.all(f"serving/throughput-{run}-") for name, run in RUNS.items()}
    found = {name: _in_order(map(_with_bound, table)) for name, table in tables.items()}
    values = {f"throughput_{name}": _with_gain(rows) for name, rows in found.items()}
    return values | {"large": _with_gain(_in_order(results.all("large/")))}


def _in_order(found: Iterable[Result]) -> list[Result]:
    """By system, and by load where there are several; with their systems' labels."""
    ordered = sorted(found, key=lambda result: (list(SYSTEMS).index(result["system"]), result.get("load", 0)))
    return [result | {"label": SYSTEMS[result["system"]].label} for result in ordered]


def _with_gain(found: Sequence[Result]) -> list[Result]:
    """With their throughput over that of diffusers one at a time; none without it."""
    bases = [result["throughput"] for result in found if result["system"] == "diffusers"]
    return [result | {"gain": result["throughput"] / base} for base in bases for result in found]


def _with_bound(result: Result) -> Result:
    """The bound is the throughput of workers that never wait: edits over the seconds that their stages took."""
    if not result["worker_seconds"]:
        return result
    return result | {"bound": result["num_edits"] / sum(result["worker_seconds"].values())}


def _steps(results: Results) -> dict[str, Any]:
    """A row for each way to leave out steps, and Stencil's calibrated schedule against those of diffusers."""
    rounds: dict[str, list[Result]] = {}
    for result in results.all("steps/round-"):
        rounds.setdefault(result["way"], []).append(result)
    if CALIBRATED not in rounds:
        return {}
    ours = rounds[CALIBRATED]
    rows = sorted((_against(ours, runs) for runs in rounds.values()), key=lambda row: row["throughput"])
    theirs = [row for row in rows if "levels" in row]
    close = [row for row in theirs if row["ssim_mean"] >= ours[0]["ssim_mean"]]
    same = [row for row in theirs if row["levels"] == SAME_LEVELS]
    (quality,) = _lines(results, "steps/quality")
    return {"steps": rows, "steps_close": close[-1], "steps_same": same[-1], "steps_quality": quality}


def _against(ours: Sequence[Result], runs: Sequence[Result]) -> Result:
    """Medians of one way's rounds, and of the ratios of our edits per second to its own in the same round."""
    rates, other = ([run["throughput"] for run in some] for some in (runs, ours))
    failed = sum(run["num_failed"] for run in runs)
    number = min(len(rates), len(other))  # a sweep may have been interrupted
    gain = median_ratio(other[:number], rates[:number])
    return runs[0] | {"throughput": statistics.median(rates), "gain": gain, "num_failed": failed}


def _headline(results: Results) -> dict[str, Any]:
    found = _in_order(results.all("serving/headline-"))
    names = list(dict.fromkeys(result["system"] for result in found))
    if len(names) < 2:
        return {}
    rows = {name: _medians([result for result in found if result["system"] == name]) for name in names}
    gain = rows["diffusers"]["latency_mean_ms"] / rows["stencil"]["latency_mean_ms"]
    facts = {"load": found[0]["load"], "num_edits": found[0]["num_edits"], "seeds": len(found) // len(names)}
    return {"headline": list(rows.values()), "headlines": facts | {"gain": gain}}


def _medians(runs: Sequence[Result]) -> Result:
    """Of one system's runs; infinite where an edit failed."""
    columns = {name: [float("inf") if run[name] is None else run[name] for run in runs] for name in MEDIANS}
    verdicts = " ".join("yes" if run["keeps_up"] else "no" for run in runs)
    failed = sum(run["num_failed"] for run in runs)
    medians = {name: statistics.median(values) for name, values in columns.items()}
    return runs[0] | medians | {"verdicts": verdicts, "num_failed": failed}


def _keep_up(results: Results) -> dict[str, Any]:
    """Runs above diffusers' capacity, whose throughput is a load of 1."""
    base = results.find("serving/throughput-public-8-diffusers")
    runs = _in_order(results.all("serving/keep-up-"))
    return {"keep_up": [_with_load(run, base) for run in runs]}


def _with_load(run: Result, base: Result | None) -> Result:
    verdict = "yes" if run["keeps_up"] else "no"
    return run | {"verdict": verdict, "offered": base and run["request_rate"] / base["throughput"]}


def _stages(results: Results) -> dict[str, Any]:
    """Milliseconds of an edit by stage and run."""
    runs = {name: results.find(f"serving/throughput-{run}-stencil") for name, run in RUNS.items()}
    stages: dict[str, dict[str, Any]] = {}
    totals: dict[str, float] = {}
    for name, run in ((name, run) for name, run in runs.items() if run is not None):
        for stage, seconds in (run["worker_seconds"] or {}).items():
            taken = 1e3 * seconds / run["num_edits"]
            stages.setdefault(stage, {"stage": stage})[name] = taken
            totals[name] = totals.get(name, 0.0) + taken
    return {"stages": list(stages.values()), "all_stages": [totals] if totals else []}


# --------------------------------------------------------------------------------------------------------- other parts


def _quality(results: Results) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in _lines(results, "quality"):
        systems = [one | {"title": _title(name, one, line)} for name, one in line["systems"].items()]
        values |= {"quality": line, f"quality_{line['masks']}": line, f"quality_{line['masks']}_systems": systems}
    return values


def _title(name: str, system: Result, line: Result) -> str:
    """With the number of edits, where it had fewer than the others."""
    return f"{name} ({system['num_edits']})" if system["num_edits"] < line["num_edits"] else name


def _others(results: Results) -> dict[str, Any]:
    fleet = {line["scenario"]: line for line in _lines(results, "fleet/")}
    gain = fleet["one-at-a-time"]["mean"] / fleet["same-rate"]["mean"] if len(fleet) > 1 else None
    routing = [{"routing_ms": line["mask-aware_median_us"] / 1e3} for line in _lines(results, "overheads/routing")]
    own = _lines(results, "overheads/step-and-handover")
    return {
        "one_at_a_time": [fleet["one-at-a-time"]] if gain else [],
        "same_rate": [fleet["same-rate"]] if gain else [],
        "fleet_gain": gain,
        "mask_ratios": [_in_ms(line) for line in _lines(results, "mask-ratio/edit")],
        "cost_model": _lines(results, "cost-model"),
        "overheads": [one | other for one, other in zip(own, routing, strict=False)],
    }


def _lines(results: Results, prefix: str) -> list[Result]:
    """What commands printed."""
    return [line for result in results.all(prefix) for line in result["lines"]]


def _in_ms(line: Result) -> Result:
    return line | {f"{kind}_ms": 1e3 * line[f"{kind}_s"] for kind in ("exact", "warm", "cold")}
