"""docs/benchmarks.md: every number comes out of a file of results, but for those of measuring.md, its end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.evidence import text
from benchmarks.evidence.plan import AREAS
from benchmarks.evidence.results import Result, Results

Rows = Iterable[Sequence[str]]

MEASURING = Path(__file__).with_name("measuring.md")
"""The end of the page: single runs and how to measure, written by hand."""

ENOUGH = 100
"""Arrivals, from which on it shows whether a system keeps up."""


def write_document(results: Results, folder: Path) -> None:
    """With plots of what there is; sections without results are left out."""
    from benchmarks.evidence.plots import write_plots

    plots = write_plots(results, folder)
    sections = [section(results, plots) for section in _SECTIONS]
    whole = "\n".join([text.HEAD, *(section for section in sections if section), MEASURING.read_text()])
    (folder / "benchmarks.md").write_text(whole.rstrip() + "\n")


def table(head: Sequence[str], rows: Rows) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _picture(plots: dict[str, str], name: str, what: str) -> str:
    return f"![{what}]({plots[name]})\n" if name in plots else ""


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# ------------------------------------------------------------------------------------------------------------- serving


def _throughput(results: Results, plots: dict[str, str]) -> str:
    parts = []
    for areas, steps in [*((areas, 8) for areas in AREAS), ("public", 28)]:
        found = {r["system"]: r for r in results.all(f"serving/throughput-{areas}-{steps}-")}
        if "diffusers" in found:
            parts.append(f"### Throughput, {steps} steps, area mean {AREAS[areas]}\n\n{_throughput_table(found)}")
    return "## Throughput\n\n" + "\n".join(parts) if parts else ""


def _throughput_table(found: dict[str, Result]) -> str:
    """The bound is what the workers would make if they never waited: edits over the seconds that the stages took."""
    base = found["diffusers"]["throughput"]
    rows = []
    for name in SYSTEMS:
        if name not in found:
            continue
        result = found[name]
        bound = result["num_edits"] / sum(result["worker_seconds"].values()) if result["worker_seconds"] else None
        share = None if bound is None else result["throughput"] / bound
        rows.append(
            [
                SYSTEMS[name].label,
                _number(result["throughput"]),
                f"{result['throughput'] / base:.2f}x",
                _number(bound),
                _number(share),
                _number(result["mask_ratio"]),
                _number(result["hit_ratio"]),
                str(result["num_failed"]),
            ]
        )
    head = ["system", "edits/s", "against one at a time", "bound", "share of it", "mask ratio", "hit ratio", "failed"]
    return table(head, rows)


def _headline(results: Results, plots: dict[str, str]) -> str:
    found = list(results.all("serving/headline-"))
    names = list(dict.fromkeys(result["system"] for result in found))
    if len(names) < 2:
        return ""
    rows, means = [], dict[str, float]()
    for name in names:
        runs = [result for result in found if result["system"] == name]
        means[name] = _median(runs, "latency_mean_ms")
        rows.append(
            [
                SYSTEMS[name].label,
                _number(_median(runs, "request_rate")),
                *(_number(_median(runs, f"latency_{figure}_ms"), 0) for figure in ("mean", "median", "p95", "p99")),
                _number(_median(runs, "queue_mean_ms"), 0),
                " ".join("yes" if run["keeps_up"] else "no" for run in runs),
                str(sum(run["num_failed"] for run in runs)),
            ]
        )
    head = ["system", "edits/s", "mean ms", "median", "P95", "P99", "queue mean", "keeps up", "failed"]
    gain = means["diffusers"] / means["stencil"]
    what = f"{found[0]['num_edits']} Poisson arrivals, medians of {len(found) // len(names)} seeds"
    return (
        f"## Latency at {found[0]['load']:g} of diffusers' capacity\n\n{what}, the same for both.\n\n"
        f"{table(head, rows)}\nMean latency {gain:.1f}x lower.\n"
    )


def _median(runs: Sequence[Result], name: str) -> float:
    """Infinite where an edit failed."""
    return statistics.median(float("inf") if run[name] is None else run[name] for run in runs)


def _rates(results: Results, plots: dict[str, str]) -> str:
    found = [*results.all("serving/rate-"), *results.all("serving/keep-up-")]
    if not found:
        return ""
    order = list(SYSTEMS)
    found.sort(key=lambda result: (order.index(result["system"]), result["load"]))
    base = results.find("serving/throughput-public-8-diffusers")
    capacity = base["throughput"] if base is not None else float("nan")
    rows = [
        [
            SYSTEMS[result["system"]].label,
            str(result["num_edits"]),
            f"{result['request_rate'] / capacity:.2f}",
            _number(result["request_rate"]),
            _number(result["throughput"]),
            _number(result["latency_mean_ms"], 0),
            _number(result["queue_mean_ms"], 0),
            ("yes" if result["keeps_up"] else "no") if result["num_edits"] >= ENOUGH else "",
        ]
        for result in found
    ]
    head = ["system", "edits", "load", "offered/s", "throughput", "mean ms", "queue mean ms", "keeps up"]
    return f"{text.RATES}\n{_picture(plots, 'rates', 'Latency and queue time by rate')}\n{table(head, rows)}"


def _stages(results: Results, plots: dict[str, str]) -> str:
    runs = {
        f"{steps} steps, area mean {AREAS[areas]}": results.find(f"serving/throughput-{areas}-{steps}-stencil")
        for areas, steps in (("public", 8), ("flashps-prod", 8), ("public", 28))
    }
    spent = {
        title: {stage: 1e3 * seconds / run["num_edits"] for stage, seconds in run["worker_seconds"].items()}
        for title, run in runs.items()
        if run is not None and run["worker_seconds"]
    }
    if not spent:
        return ""
    stages = list(dict.fromkeys(stage for by_stage in spent.values() for stage in by_stage))
    rows = [[stage, *(_number(by_stage.get(stage), 1) for by_stage in spent.values())] for stage in stages]
    rows.append(["**worker, all**", *(f"**{sum(by_stage.values()):.1f}**" for by_stage in spent.values())])
    return f"{text.STAGES}\n{table(['stage', *spent], rows)}"


# --------------------------------------------------------------------------------------------------------- other parts


def _large(results: Results, plots: dict[str, str]) -> str:
    return _compared(text.LARGE, list(results.all("large/")))


def _two_engines(results: Results, plots: dict[str, str]) -> str:
    return _compared(text.TWO_ENGINES, list(results.all("two-engines/")))


def _compared(about: str, found: Sequence[Result]) -> str:
    """Throughput against diffusers'."""
    base = [result["throughput"] for result in found if result["system"] == "diffusers"]
    rows = [
        [
            SYSTEMS[result["system"]].label,
            f"{result['throughput']:.3f}",
            f"{result['throughput'] / base[0]:.2f}x",
            _number(result["mask_ratio"]),
            _number(result["hit_ratio"]),
        ]
        for result in found
        if base
    ]
    head = ["system", "edits/s", "against one at a time", "mask ratio", "hit ratio"]
    return f"{about}\n{table(head, rows)}" if rows else ""


def _batch_sizes(results: Results, plots: dict[str, str]) -> str:
    lines = [result["lines"][0] for result in results.all("batch-size/")]
    if not lines:
        return ""
    sizes = sorted({line["batch_size"] for line in lines})
    rates = {(line["backend"], line["batch_size"]): line["edits_per_s"] for line in lines}
    backends = list(dict.fromkeys(backend for backend, _ in rates))
    rows = [[backend, *(_number(rates.get((backend, size))) for size in sizes)] for backend in backends]
    head = ["edits/s", *map(str, sizes)]
    return f"{text.BATCH_SIZES}\n{_picture(plots, 'batch_sizes', 'Throughput by batch size')}\n{table(head, rows)}"


def _mask_ratios(results: Results, plots: dict[str, str]) -> str:
    edit = results.find("mask-ratio/edit")
    if edit is None:
        return ""
    rows = [
        [
            f"{line['mask_ratio']:.2f}",
            *(f"{1e3 * line[f'{kind}_s']:.0f}" for kind in ("exact", "warm", "cold")),
            f"{line['warm_speedup']:.2f}x",
        ]
        for line in edit["lines"]
    ]
    head = ["mask ratio", "exact ms", "warm ms", "cold ms", "warm against exact"]
    return f"{text.MASK_RATIOS}\n{_picture(plots, 'mask_ratios', 'Latency by mask ratio')}\n{table(head, rows)}"


def _batching(results: Results, plots: dict[str, str]) -> str:
    result = results.find("batching")
    if result is None:
        return ""
    (line,) = result["lines"]
    names = ("static", "continuous", "disaggregated")
    figures = {"P95 of requests, s": "p95_s", "mean, s": "mean_s", "P95 of inference, s": "inference_p95_s"}
    figures |= {"interruptions, mean": "interruptions_mean", "cores used by others": "foreign_cores"}
    rows = [[title, *(_number(line[f"{name}_{figure}"]) for name in names)] for title, figure in figures.items()]
    policies = [line for found in results.all("policies/") for line in found["lines"]]
    simulated = [[run["scenario"], run["policy"], _number(run["p95"]), _number(run["mean"])] for run in policies]
    routing = table(["scenario", "policy", "P95, s", "mean, s"], simulated) if simulated else ""
    picture = _picture(plots, "batching", "P95 by batching and by policy")
    return f"{text.BATCHING}\n{picture}\n{table(['', *names], rows)}\n{routing}"


def _cost_model(results: Results, plots: dict[str, str]) -> str:
    result = results.find("cost-model")
    if result is None:
        return ""
    (line,) = result["lines"]
    names = {"denoise": "after_training_batches_denoise", "prime": "after_training_batches_prime"}
    rows = [
        [stage, f"{line[f'{name}_r_squared']:.4f}", f"{line[f'{name}_median_error']:.1%}"]
        for stage, name in names.items()
    ]
    head = ["stage", "R^2", "median error"]
    return f"{text.COST_MODEL}\n{_picture(plots, 'cost_model', 'Predicted and measured')}\n{table(head, rows)}"


def _overheads(results: Results, plots: dict[str, str]) -> str:
    own, routing = results.find("overheads/step-and-handover"), results.find("overheads/routing")
    if own is None or routing is None:
        return ""
    (line,), (route,) = own["lines"], routing["lines"]
    rows = [
        ["a routing decision, 8 engines", f"{route['mask-aware_median_us'] / 1e3:.3f}", "0.6"],
        ["schedule, plan and result of a step of 8 edits", f"{line['step_batch_8_ms']:.3f}", "1.2"],
        ["hand-over of a finished 1024 x 1024 picture", f"{line['handover_ms']:.3f}", "1.1 + 1.3"],
    ]
    return f"{text.OVERHEADS}\n{table(['', 'median ms', 'FlashPS, section 6.6'], rows)}"


def _quality(results: Results, plots: dict[str, str]) -> str:
    parts = [_quality_table(line) for found in results.all("quality/") for line in found["lines"]]
    return f"{text.QUALITY}\n" + "\n".join(parts) if parts else ""


def _fleet(results: Results, plots: dict[str, str]) -> str:
    """FlashPS's claims, of a fleet of GPUs that is made up."""
    found = [line for result in results.all("fleet/") for line in result["lines"]]
    if len(found) < len(text.FLEETS):
        return ""
    mean = {line["scenario"]: line["mean"] for line in found}
    rows = [
        [
            text.FLEETS[line["scenario"]],
            _number(line["offered"]),
            _number(line["mean"]),
            _number(line["p95"]),
            f"{line['utilization']:.0%}",
        ]
        for line in found
    ]
    head = ["8 simulated engines", "edits/s", "mean latency, s", "P95, s", "busy"]
    gain = mean["one-at-a-time"] / mean["same-rate"]
    return f"{text.FLEET}\n{table(head, rows)}\nMean latency {gain:.1f}x lower.\n"


def _quality_table(line: Result) -> str:
    rows = [
        [
            f"{name} ({one['num_edits']})" if one["num_edits"] < line["num_edits"] else name,
            f"{one['ssim_box_mean']:.4f} / {one['ssim_box_p10']:.4f}",
            _number(one["psnr_box_mean_db"], 1),
            f"{one['ssim_whole_mean']:.4f}",
            f"{one['ssim_whole_pasted_mean']:.4f}",
            f"{one['colour']:.1%}, {one['pattern']:.1%}",
            f"{one['feature_distance']:.3f}",
            f"{one['outside_error_mean']:.2f}",
            f"{one['seconds_per_edit']:.2f}",
        ]
        for name, one in line["systems"].items()
    ]
    head = [
        *("system", "SSIM in box, mean / P10", "PSNR in box, dB", "SSIM whole, as returned", "SSIM whole, pasted"),
        *("colour, pattern", "feature distance", "error outside, of 255", "s per edit"),
    ]
    masks, steps, number = line["masks"], line["steps"], line["num_edits"]
    sheet = f"![Template, mask, diffusers, step skipping, Stencil](benchmarks_sheet_{masks}.png)"
    threshold = f"first-block cache with threshold {line['first_block_cache']:g}"
    return f"### {masks} masks, {number} edits, {steps} steps, {threshold}\n\n{table(head, rows)}\n{sheet}\n"


_SECTIONS: tuple[Callable[[Results, dict[str, str]], str], ...] = (
    _throughput,
    _headline,
    _rates,
    _stages,
    _fleet,
    _large,
    _two_engines,
    _quality,
    _batch_sizes,
    _mask_ratios,
    _batching,
    _cost_model,
    _overheads,
)
