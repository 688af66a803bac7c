"""docs/gpu.md: prose from page.md; for each card, tables from card.md and its file of results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.markdown import fill, table_row
from benchmarks.gpu.bars import Bar, bars
from benchmarks.gpu.report import BROKEN, SKIPPED, WITHOUT_GRAPHS, Figures, read
from benchmarks.gpu.sizes import FULL
from core.page_scheme import PageLayout

PAGE, CARD = (Path(__file__).with_name(name) for name in ("page.md", "card.md"))
RESULTS, DOCUMENT = "gpu_results", "gpu.md"

FLUX_BLOCKS, FLUX_HEADS, FLUX_HEAD_DIM = 57, 24, 128
"""FLUX.1-dev has 19 double and 38 single blocks."""
LINK_BYTES_PER_SECOND = 50e9  # of PCI Express 5 with 16 lanes, about

SECTIONS = {
    "machine": "bandwidths, products, launches",
    "kernel_tests": "tests that need a GPU",
    "flux_steps": "steps of FLUX",
    "sdxl": "steps and edits of SDXL",
    "family_steps": "steps of FLUX.2 klein and Z-Image",
    "flux_cold": "first and later edits of FLUX",
    "engine_edits": "edits of FLUX through an engine",
    "flux_host_pages": "pages from host memory",
    "kernel_times": "launches, time by kernel",
    "overhead": "what comes before a step's first kernel",
    "invariance": "edits whose bits do not depend on their batch",
    "fp8": "products in 8-bit floats",
    "served": "an edit by a server's processes",
    "correctness": "edits against a CPU's",
    "attention": "ways of attention",
    "offload": "text encoders and VAE in host memory",
}
"""Section -> what it measures, in the order in which they run."""


def results_file(folder: Path, device: str) -> Path:
    """The file with a card's results. device: the card's name."""
    return folder / RESULTS / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def write_document(folder: Path) -> None:
    """Write the page from the folder's results, if there are any."""
    (folder / DOCUMENT).write_text(render(all_results(folder)))


def all_results(folder: Path) -> list[Figures]:
    """The results of all cards, in the order of their names."""
    found = (read(path) for path in sorted((folder / RESULTS).glob("*.json")))
    return [results for results in found if results is not None]


def render(cards: Sequence[Figures]) -> str:
    """The page in Markdown. cards: the results of each card."""
    values = _expected()
    if not any(card["about"]["device_type"] == "cuda" for card in cards):
        values["cpu_only"] = ""
    if cards:
        values |= {"bars": _bars(cards), "coverage": _coverage(cards)}
    page = fill(PAGE.read_text(), values)
    return "\n".join([page, *(fill(CARD.read_text(), _measured(card["about"], card["sections"])) for card in cards)])


def _expected() -> Figures:
    """Bounds of FLUX's shape at full size."""
    size = FULL.flux
    tokens = size.image_tokens + size.text_tokens
    active = {ratio: round(ratio * size.image_tokens) for ratio in size.ratios if ratio < 1}
    layout = PageLayout(num_blocks=FLUX_BLOCKS, num_heads=FLUX_HEADS, head_dim=FLUX_HEAD_DIM, dtype="int8")
    entry = layout.entry_bytes(size.image_tokens)
    return {
        "bounds": [{"ratio": r, "active": n, "bound": tokens / (n + size.text_tokens)} for r, n in active.items()],
        "expected": {
            "text_tokens": size.text_tokens,
            "entry_gb": entry / 1e9,
            "load_ms": 1e3 * entry / LINK_BYTES_PER_SECOND,
            "steps": size.steps,
            "steps_per_keyframe": size.steps / (size.keyframes - 1),
        },
    }


# ----------------------------------------------------------------------------------------------------------- all cards


def _bars(cards: Sequence[Figures]) -> str:
    """A table with a line for each bar and a column for each card."""
    columns = [bars(card["sections"]) for card in cards]
    rows = [(each[0].name, each[0].target, *map(_result, each)) for each in zip(*columns, strict=True)]
    return _table(["", "target", *(card["about"]["device"] for card in cards)], rows)


def _result(bar: Bar) -> str:
    return bar.verdict if bar.measured is None else f"{bar.measured:.3g}: {bar.verdict}"


def _coverage(cards: Sequence[Figures]) -> str:
    """A table with a line for each section: on which cards it has run."""
    rows = [(f"`{name}`", what, *(_state(name, card["sections"]) for card in cards)) for name, what in SECTIONS.items()]
    return _table(["section", "what", *(card["about"]["device"] for card in cards)], rows)


def _state(section: str, sections: Mapping[str, Any]) -> str:
    if section in sections.get(BROKEN, {}):
        return "failed"
    if section in sections.get(SKIPPED, {}):
        return "in part" if section in sections else "no"
    return "yes" if section in sections else "no"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(map(table_row, [head, ["---"] * len(head), *rows]))


# ------------------------------------------------------------------------------------------------------------ one card


def _measured(about: Figures, sections: Mapping[str, Any]) -> Figures:
    """The sections' figures under their names, and rows made of them."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    values: Figures = {**sections, "about": about | {"versions": versions, "cuda": about["cuda"] or "none"}}
    if about["device_type"] != "cuda" or about["size"] != FULL.name:
        values["trial"] = about
    for name, rows in _ROWS.items():
        if name in sections:
            values |= rows(sections[name])
    return values


def _steps(figures: Figures) -> Figures:
    rows = [_batch(batch, one) for batch, one in figures["batches"].items()]
    return {"steps": rows} | _graphs(figures)


def _graphs(figures: Figures) -> Figures:
    """The captures of a section's CUDA graphs, where there are any."""
    graphs = figures.get("graphs") or {}
    return {"flux_graphs": graphs} if graphs else {}


def _batch(batch: str, figures: Figures) -> Figures:
    compiled, mixed = figures.get("diffusers_compiled_ms"), figures.get("mixed")
    graphs = {ratio: step | {"ms": step["graph_ms"]} for ratio, step in figures["ratios"].items() if "graph_ms" in step}
    return figures | {
        "batch": batch,
        "mixed": "" if mixed is None else _step(mixed, compiled),
        "by_ratio": {ratio: _step(step, compiled) for ratio, step in figures["ratios"].items()},
        "as_graph": {ratio: _step(step, compiled) for ratio, step in graphs.items()},
    }


def _step(step: Figures, compiled_ms: float | None) -> str:
    if compiled_ms is None:
        return f"{step['ms']:.1f}"
    faster = compiled_ms / step["ms"]
    return f"{step['ms']:.1f}: {faster:.2f}x ({faster / step['bound']:.2f})"


def _family_steps(figures: Figures) -> Figures:
    """A line for each step of each family; speed-ups are of a step as a graph, where that was timed and is faster."""
    return {
        "family_steps": [
            {"name": name, "step": step} | its
            for name, family in figures["families"].items()
            for step, its in _steps_of_family(family).items()
        ]
    }


def _steps_of_family(family: Figures) -> dict[str, Figures]:
    theirs, exact = family["diffusers_ms"], family["exact_ms"]
    steps = {"diffusers eager": {"ms": theirs}, "exact": {"ms": exact, "over_diffusers": theirs / exact}}
    for ratio, step in family["ratios"].items():
        ms = min(step["ms"], step.get("graph_ms", step["ms"]))
        faster = {"over_diffusers": theirs / ms, "over_exact": exact / ms, "share": exact / ms / step["bound"]}
        steps[f"ratio {ratio}"] = step | faster
    return steps


def _cold(figures: Figures) -> Figures:
    share = figures["cold_edit_s"] / figures["exact_edit_s"] if "cold_edit_s" in figures else None
    return {"flux_cold": figures | {"cold_share": share}}


def _engine(figures: Figures) -> Figures:
    if "exact_s" not in figures:
        return {}
    exact = figures["exact_s"]
    faster = {f"{name}_x": exact / figures[f"{name}_s"] for name in ("warm", "warm_graph") if f"{name}_s" in figures}
    batches = [
        {"edit": edit, "op": op} | its for edit, ops in figures.get("ops", {}).items() for op, its in ops.items()
    ]
    return {"engine_edits": figures | faster | {"cold_share": figures["cold_s"] / exact}, "edit_ops": batches}


def _kernel_times(figures: Figures) -> Figures:
    steps = [
        step | {"model": model.upper(), "step": name}
        for model in ("flux", "sdxl")
        for name, step in figures.get(model, {}).items()
    ]
    masked = [step for step in steps if step["step"] == "masked"]
    kernels = [kernel | {"model": step["model"]} for step in masked for kernel in step["kernels"]]
    return {"step_launches": steps, "kernels": kernels}


def _checkpoints(figures: Figures) -> Figures:
    checkpoints = figures["checkpoints"].items()
    return {
        "checkpoints": [
            {"name": name} | {dtype: _worst(ways) for dtype, ways in one.items()} for name, one in checkpoints
        ]
    }


def _worst(ways: Mapping[str, Figures]) -> Figures:
    """The worst figures of exact and mask-aware edits."""
    picks = {"mean_levels": max, "max_levels": max, "share_within_1": min}
    return {name: pick(way[name] for way in ways.values()) for name, pick in picks.items()}


def _attention(figures: Figures) -> Figures:
    return {
        "attention_steps": [
            {"batch": batch, "ratio": figures["ratio"], "way": way, "ms": ms}
            for batch, ways in figures.get("steps", {}).items()
            for way, ms in ways.items()
        ]
    }


def _fp8(figures: Figures) -> Figures:
    return {"fp8_products": figures["products"]}


def _unfinished(reasons: Mapping[str, str]) -> Figures:
    return {"unfinished": "\n".join(f"- `{name}`: {why}" for name, why in reasons.items())}


def _failures(traces: Mapping[str, str]) -> Figures:
    return {"failures": _traces(traces)}


def _graph_failures(traces: Mapping[str, str]) -> Figures:
    return {"graph_failures": _traces(traces)}


def _traces(traces: Mapping[str, str]) -> str:
    return "\n\n".join(f"`{name}`:\n\n```\n{trace.rstrip()}\n```" for name, trace in traces.items())


_ROWS = {
    "flux_steps": _steps,
    "family_steps": _family_steps,
    "flux_cold": _cold,
    "engine_edits": _engine,
    "kernel_times": _kernel_times,
    "correctness": _checkpoints,
    "attention": _attention,
    "fp8": _fp8,
    SKIPPED: _unfinished,
    BROKEN: _failures,
    WITHOUT_GRAPHS: _graph_failures,
}
