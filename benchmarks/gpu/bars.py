"""What a GPU machine must show, and whether it did: arithmetic over the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Sections = Mapping[str, Mapping[str, Any]]

Verdict = Literal["pass", "miss", "not run"]


@dataclass(frozen=True)
class Bar:
    """at_least, at_most: the target, one of the two. measured: None where the run did not get there."""

    name: str
    measured: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> Verdict:
        if self.measured is None:
            return "not run"
        is_high_enough = self.at_least is None or self.measured >= self.at_least  # which NaN is not
        is_low_enough = self.at_most is None or self.measured <= self.at_most
        return "pass" if is_high_enough and is_low_enough else "miss"

    @property
    def target(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    @property
    def line(self) -> str:
        """For people, on one line."""
        value = "" if self.measured is None else f"{self.measured:.4g}, "
        return f"{self.verdict:<8} {self.name}: {value}{self.target}"


def bars(sections: Sections) -> list[Bar]:
    """All of them, in their order; sections: of the file of results, those that there are."""
    return [
        Bar("edits in float32, least share of pixel values within 1 of 255 of a CPU's", _of(_alike, sections), 0.999),
        Bar("the same of an edit by a server's own processes", _of(_served, sections), 0.999),
        Bar("tests of kernels on the GPU, 1 if all pass", _of(_tests, sections), 1),
        Bar("embedded model in bfloat16, mean difference from float32 in levels of 255", _of(_bf16, sections), None, 1),
        Bar("FLUX step at mask ratio 0.2, batch 1, x diffusers compiled", _of(_step("1", "0.2"), sections), 2.8),
        Bar("FLUX step at mask ratio 0.1, batch 1, x diffusers compiled", _of(_step("1", "0.1"), sections), 3.8),
        Bar("the same in batches of 4 and more, least share of the bound", _of(_bound_share, sections), 0.85),
        Bar(
            "FLUX step at mask ratio 0.2, pages from the host, x with pages on the device",
            _of(_host, sections),
            None,
            1.05,
        ),
        Bar("copies of these pages, share of their time that lies under kernels", _of(_hidden, sections), 0.9),
        Bar("priming at 5 keyframes, in exact steps", _of(_priming, sections), None, 6),
        Bar("first edit of a new picture at mask ratio 0.1, x the exact edit's time", _of(_cold, sections), None, 0.45),
        Bar(
            "SDXL warm edit at mask ratio 0.2, our faster one, x diffusers eager",
            _of(_sdxl, sections),
            2.2,
        ),
        Bar("overhead of a step of 8 edits up to its first kernel, ms", _of(_overhead, sections), None, 1),
    ]


def _of(figure: Callable[[Sections], float], sections: Sections) -> float | None:
    """None where a figure it needs is not there."""
    try:
        return figure(sections)
    except KeyError:
        return None


def _alike(sections: Sections) -> float:
    checkpoints = sections["correctness"]["checkpoints"].values()
    if "correctness" in sections.get("broken", {}):
        raise KeyError("not all of them are there")
    return min(float(way["share_within_1"]) for each in checkpoints for way in each["float32"].values())


def _served(sections: Sections) -> float:
    return float(sections["served"]["share_within_1"])


def _tests(sections: Sections) -> float:
    if not sections["kernel_tests"]["has_run"]:
        raise KeyError("they were only found")
    return float(sections["kernel_tests"]["passed"])


def _bf16(sections: Sections) -> float:
    ways = sections["correctness"]["checkpoints"]["embedded"]["bfloat16"].values()
    return max(float(way["mean_levels"]) for way in ways)


def _step(batch: str, ratio: str) -> Callable[[Sections], float]:
    """How much faster than diffusers compiled."""

    def figure(sections: Sections) -> float:
        figures = sections["flux_steps"]["batches"][batch]
        return float(figures["diffusers_compiled_ms"] / figures["ratios"][ratio]["ms"])

    return figure


def _bound_share(sections: Sections) -> float:
    batches = sections["flux_steps"]["batches"]
    large = [batch for batch in batches if int(batch) >= 4]
    shares = [
        _step(batch, ratio)(sections) / float(batches[batch]["ratios"][ratio]["bound"])
        for batch in large
        for ratio in ("0.1", "0.2")
    ]
    if not shares:
        raise KeyError("no such batch")
    return min(shares)


def _host(sections: Sections) -> float:
    figures = sections["flux_host_pages"]["ratios"]["0.2"]
    return float(figures["host_step_ms"] / figures["device_step_ms"])


def _hidden(sections: Sections) -> float:
    return float(sections["flux_host_pages"]["ratios"]["0.2"]["hidden_share"])


def _priming(sections: Sections) -> float:
    return float(sections["flux_cold"]["prime_ms"] / sections["flux_cold"]["exact_step_ms"])


def _cold(sections: Sections) -> float:
    return float(sections["flux_cold"]["cold_edit_s"] / sections["flux_cold"]["exact_edit_s"])


def _sdxl(sections: Sections) -> float:
    sdxl = sections["sdxl"]
    ours = min(sdxl["masked_edit_s"], sdxl.get("masked_compiled_edit_s", sdxl["masked_edit_s"]))
    return float(sdxl["diffusers_edit_s"] / ours)


def _overhead(sections: Sections) -> float:
    return float(sections["overhead"]["total_ms"])
