"""The bars that a GPU machine must reach, computed from the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Sections = Mapping[str, Any]
"""Figures by section, as in the file of results."""

Figure = Callable[[Sections], Any]
"""A number; KeyError where a figure it needs is missing."""

Verdict = Literal["pass", "miss", "not run"]


@dataclass(frozen=True)
class Bar:
    """at_least, at_most: the target, one of the two. measured: None where the run has no such figure."""

    name: str
    measured: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> Verdict:
        if self.measured is None:
            return "not run"
        is_high_enough = self.at_least is None or self.measured >= self.at_least  # False for NaN
        is_low_enough = self.at_most is None or self.measured <= self.at_most
        return "pass" if is_high_enough and is_low_enough else "miss"

    @property
    def target(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    @property
    def line(self) -> str:
        value = "" if self.measured is None else f"{self.measured:.4g}, "
        return f"{self.verdict:<8} {self.name}: {value}{self.target}"


def bars(sections: Sections) -> list[Bar]:
    """All of them; sections: those that have run."""
    return [Bar(name, _measured(figure, sections), **target) for name, figure, target in _BARS]


def _measured(figure: Figure, sections: Sections) -> float | None:
    """None where a figure it needs is missing."""
    try:
        return float(figure(sections))
    except KeyError:
        return None


def _float32_share(sections: Sections) -> Any:
    if "correctness" in sections.get("broken", {}):
        raise KeyError("some checkpoints are missing")
    checkpoints = sections["correctness"]["checkpoints"].values()
    return min(way["share_within_1"] for each in checkpoints for way in each["float32"].values())


def _kernel_tests(sections: Sections) -> Any:
    if not sections["kernel_tests"]["has_run"]:
        raise KeyError("tests were collected only")
    return sections["kernel_tests"]["passed"]


def _bfloat16_levels(sections: Sections) -> Any:
    return max(way["mean_levels"] for way in sections["correctness"]["checkpoints"]["embedded"]["bfloat16"].values())


def _speedup(sections: Sections, batch: str, ratio: str) -> Any:
    """Over diffusers compiled."""
    figures = sections["flux_steps"]["batches"][batch]
    return figures["diffusers_compiled_ms"] / figures["ratios"][ratio]["ms"]


def _one_edit(sections: Sections) -> Any:
    return sections["flux_steps"]["batches"]["1"]


def _mixed(sections: Sections) -> Any:
    """Over diffusers eager."""
    figures = sections["flux_steps"]["batches"]["8"]
    return figures["diffusers_ms"] / figures["mixed"]["ms"]


def _bound_share(sections: Sections) -> Any:
    batches = sections["flux_steps"]["batches"]
    steps = [(batch, ratio) for batch in batches if int(batch) >= 4 for ratio in ("0.1", "0.2")]
    if not steps:
        raise KeyError("no such batch")
    return min(_speedup(sections, *step) / batches[step[0]]["ratios"][step[1]]["bound"] for step in steps)


def _host_pages(sections: Sections) -> Any:
    return sections["flux_host_pages"]["ratios"]["0.2"]


def _sdxl(sections: Sections) -> Any:
    sdxl = sections["sdxl"]
    return sdxl["diffusers_edit_s"] / min(sdxl["masked_edit_s"], sdxl.get("masked_compiled_edit_s", float("inf")))


def _quotient(figures: Mapping[str, Any], over: str, under: str) -> Any:
    return figures[over] / figures[under]


_BARS: list[tuple[str, Figure, dict[str, float]]] = [
    ("edits in float32, least share of pixel values within 1 of 255 of a CPU's", _float32_share, {"at_least": 0.999}),
    ("the same of an edit by a server's own processes", lambda s: s["served"]["share_within_1"], {"at_least": 0.999}),
    ("tests of kernels on the GPU, 1 if all pass", _kernel_tests, {"at_least": 1}),
    ("embedded model in bfloat16, mean difference from a CPU's in levels of 255", _bfloat16_levels, {"at_most": 1}),
    (
        "FLUX step at mask ratio 0.2, batch 1, x diffusers compiled",
        lambda s: _speedup(s, "1", "0.2"),
        {"at_least": 2.8},
    ),
    (
        "FLUX step at mask ratio 0.1, batch 1, x diffusers compiled",
        lambda s: _speedup(s, "1", "0.1"),
        {"at_least": 3.8},
    ),
    ("the same in batches of 4 and more, least share of the bound", _bound_share, {"at_least": 0.85}),
    (
        "FLUX step at mask ratio 0.2, batch 1, x our exact step",
        lambda s: _one_edit(s)["exact_ms"] / _one_edit(s)["ratios"]["0.2"]["ms"],
        {"at_least": 3},
    ),
    (
        "our exact FLUX step, batch 1, x diffusers compiled",
        lambda s: _quotient(_one_edit(s), "diffusers_compiled_ms", "exact_ms"),
        {"at_least": 1},
    ),
    ("FLUX step of 8 edits, mean mask ratio 0.13, x diffusers eager", _mixed, {"at_least": 5}),
    (
        "FLUX step at mask ratio 0.2, pages from the host, x with pages on the device",
        lambda s: _quotient(_host_pages(s), "host_step_ms", "device_step_ms"),
        {"at_most": 1.05},
    ),
    (
        "copies of these pages, share of their time that lies under kernels",
        lambda s: _host_pages(s)["hidden_share"],
        {"at_least": 0.9},
    ),
    (
        "priming at 5 keyframes, in exact steps",
        lambda s: _quotient(s["flux_cold"], "prime_ms", "exact_step_ms"),
        {"at_most": 6},
    ),
    (
        "first edit of a new picture at mask ratio 0.1, x the exact edit's time",
        lambda s: _quotient(s["flux_cold"], "cold_edit_s", "exact_edit_s"),
        {"at_most": 0.45},
    ),
    (
        "later edit of a picture at mask ratio 0.2, 28 steps, x the exact edit",
        lambda s: _quotient(s["flux_cold"], "exact_edit_s", "warm_edit_s"),
        {"at_least": 2.5},
    ),
    ("SDXL warm edit at mask ratio 0.2, our faster one, x diffusers eager", _sdxl, {"at_least": 2.2}),
    ("overhead of a step of 8 edits up to its first kernel, ms", lambda s: s["overhead"]["total_ms"], {"at_most": 1}),
]
