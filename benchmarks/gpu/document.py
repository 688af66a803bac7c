"""docs/gpu.md: prose and tables' columns from page.md, figures from the file of results or computed from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence.markdown import fill
from benchmarks.gpu.bars import bars
from benchmarks.gpu.report import Figures, read
from benchmarks.gpu.sizes import FULL
from core.page_scheme import PageLayout

PAGE = Path(__file__).with_name("page.md")
RESULTS, DOCUMENT = "gpu_results.json", "gpu.md"

FLUX_BLOCKS, FLUX_HEADS, FLUX_HEAD_DIM = 57, 24, 128
"""Of FLUX.1-dev: 19 double and 38 single blocks."""
LINK_BYTES_PER_SECOND = 50e9  # of PCI Express 5 with 16 lanes, about


def write_document(folder: Path) -> None:
    """From the folder's results, if there are any."""
    (folder / DOCUMENT).write_text(render(read(folder / RESULTS)))


def render(results: Figures | None) -> str:
    """Markdown. results: None before the first run."""
    values = _expected()
    if results is None or results["about"]["device_type"] != "cuda":
        values["cpu_only"] = ""
    if results is not None:
        values |= _measured(results["about"], results["sections"])
    return fill(PAGE.read_text(), values)


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


# ---------------------------------------------------------------------------------------------------- what was measured


def _measured(about: Figures, sections: Mapping[str, Any]) -> Figures:
    """The sections' figures under their names, and rows made of them."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    values: Figures = {**sections, "about": about | {"versions": versions, "cuda": about["cuda"] or "none"}}
    if about["device_type"] != "cuda" or about["size"] != FULL.name:
        values["trial"] = about
    values["bars"] = [
        {"name": bar.name, "measured": bar.measured, "target": bar.target, "verdict": bar.verdict}
        for bar in bars(sections)
    ]
    for name, rows in _ROWS.items():
        if name in sections:
            values |= rows(sections[name])
    return values


def _steps(figures: Figures) -> Figures:
    return {"steps": [_batch(batch, one) for batch, one in figures["batches"].items()]}


def _batch(batch: str, figures: Figures) -> Figures:
    compiled, mixed = figures.get("diffusers_compiled_ms"), figures.get("mixed")
    return figures | {
        "batch": batch,
        "mixed": "" if mixed is None else _step(mixed, compiled),
        "by_ratio": {ratio: _step(step, compiled) for ratio, step in figures["ratios"].items()},
    }


def _step(step: Figures, compiled_ms: float | None) -> str:
    if compiled_ms is None:
        return f"{step['ms']:.1f}"
    faster = compiled_ms / step["ms"]
    return f"{step['ms']:.1f}: {faster:.2f}x ({faster / step['bound']:.2f})"


def _cold(figures: Figures) -> Figures:
    share = figures["cold_edit_s"] / figures["exact_edit_s"] if "cold_edit_s" in figures else None
    return {"flux_cold": figures | {"cold_share": share}}


def _host_pages(figures: Figures) -> Figures:
    ratios = figures.get("ratios", {})
    return {
        "host_pages": [
            one | {"ratio": ratio, "slower": one["host_step_ms"] / one["device_step_ms"]}
            for ratio, one in ratios.items()
        ]
    }


def _checkpoints(figures: Figures) -> Figures:
    checkpoints = figures["checkpoints"].items()
    return {
        "checkpoints": [
            {"name": name} | {dtype: _worst(ways) for dtype, ways in one.items()} for name, one in checkpoints
        ]
    }


def _worst(ways: Mapping[str, Figures]) -> Figures:
    """Of exact and mask-aware edits."""
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


def _unfinished(reasons: Mapping[str, str]) -> Figures:
    return {"unfinished": "\n".join(f"- `{name}`: {why}" for name, why in reasons.items())}


def _failures(traces: Mapping[str, str]) -> Figures:
    return {"failures": "\n\n".join(f"`{name}`:\n\n```\n{trace.rstrip()}\n```" for name, trace in traces.items())}


_ROWS = {
    "flux_steps": _steps,
    "flux_cold": _cold,
    "flux_host_pages": _host_pages,
    "correctness": _checkpoints,
    "attention": _attention,
    "skipped": _unfinished,
    "broken": _failures,
}
