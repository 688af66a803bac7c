"""The bars that a GPU machine must reach, computed from the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.report import BROKEN, SKIPPED

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
    """All bars. sections: the figures of those that have run."""
    return [Bar(name, _measured(figure, sections), **target) for name, figure, target in _BARS]


def _measured(figure: Figure, sections: Sections) -> float | None:
    """The value of a bar; None where a figure that it needs is missing."""
    try:
        return float(figure(sections))
    except KeyError:
        return None


def _float32_share(sections: Sections) -> Any:
    if any("correctness" in sections.get(text, {}) for text in (BROKEN, SKIPPED)):
        raise KeyError("some checkpoints are missing")
    checkpoints = sections["correctness"]["checkpoints"].values()
    return min(way["share_within_1"] for each in checkpoints for way in each["float32"].values())


def _kernel_tests(sections: Sections) -> Any:
    if not sections["kernel_tests"]["has_run"]:
        raise KeyError("tests were collected only")
    return sections["kernel_tests"]["passed"]


def _bfloat16_levels(sections: Sections) -> Any:
    return max(way["mean_levels"] for way in sections["correctness"]["checkpoints"]["embedded"]["bfloat16"].values())


def _launches(model: str, step: str) -> Figure:
    return lambda sections: sections["kernel_times"][model][step]["launches"]


def _batch(sections: Sections, batch: str = "1") -> Any:
    return sections["flux_steps"]["batches"][batch]


def _masked(sections: Sections, ratio: str) -> Any:
    """Milliseconds of a step of one request as the engine makes it: as a graph where it has graphs."""
    step = _batch(sections)["ratios"][ratio]
    return step.get("graph_ms", step["ms"])


def _exact(sections: Sections) -> Any:
    """Milliseconds of the faster way, with which mask-aware steps are compared."""
    batch = _batch(sections)
    return min(batch["exact_ms"], batch.get("exact_graph_ms", batch["exact_ms"]))


def _compiled(sections: Sections) -> Any:
    return _batch(sections)["diffusers_compiled_ms"]


def _faster(sections: Sections, ratio: str) -> Any:
    """How many times as fast as compiled diffusers a step is."""
    return _compiled(sections) / _masked(sections, ratio)


def _mixed(sections: Sections) -> Any:
    """How many times as fast as eager diffusers a mixed step is."""
    batch = _batch(sections, "8")
    return batch["diffusers_ms"] / batch["mixed"]["ms"]


def _warm_edit(sections: Sections) -> Any:
    edits = sections["engine_edits"]
    return edits["exact_s"] / edits.get("warm_graph_s", edits["warm_s"])


def _first_edit(sections: Sections) -> Any:
    """A first edit's figure: the worse of its steps alone and its way through an engine, where both were measured."""
    runs, engine = sections.get("flux_cold", {}), sections.get("engine_edits", {})
    shares = [runs["cold_edit_s"] / runs["exact_edit_s"]] if "cold_edit_s" in runs else []
    shares += [engine["cold_s"] / engine["exact_s"]] if "cold_s" in engine else []
    if not shares:
        raise KeyError("neither has run")
    return max(shares)


def _hidden_share(sections: Sections) -> Any:
    return sections["flux_host_pages"]["hidden_share"]


def _sdxl(over: str, under: str) -> Figure:
    def quotient(sections: Sections) -> Any:
        sdxl = sections["sdxl"]
        return sdxl[over] / min(sdxl[under], sdxl.get(under.replace("_ms", "_graph_ms"), sdxl[under]))

    return quotient


def _graph_memory(sections: Sections) -> Any:
    """Memory of CUDA graphs, of the model whose graphs take most."""
    found = (sections.get(name, {}).get("graphs", {}) for name in ("flux_steps", "sdxl", "engine_edits"))
    pools = [graphs["pool_gb"] for graphs in found if "pool_gb" in graphs]
    if not pools:
        raise KeyError("there are no graphs")
    return max(pools)


_BARS: list[tuple[str, Figure, dict[str, float]]] = [
    ("FLUX step at ratio 0.2, x our exact step", lambda s: _exact(s) / _masked(s, "0.2"), {"at_least": 3}),
    (
        "FLUX step at ratio 0.2, x diffusers compiled",
        lambda s: _faster(s, "0.2"),
        {"at_least": 2.8},
    ),
    (
        "FLUX step at ratio 0.1, x diffusers compiled",
        lambda s: _faster(s, "0.1"),
        {"at_least": 3.8},
    ),
    ("our exact FLUX step, x diffusers compiled", lambda s: _compiled(s) / _exact(s), {"at_least": 1}),
    ("FLUX step of 8 edits, mean mask ratio 0.13, x diffusers eager", _mixed, {"at_least": 5}),
    ("FLUX masked step, launches", _launches("flux", "masked"), {"at_most": 560}),
    ("FLUX masked step of 8 edits, launches", _launches("flux", "masked, batch of 8"), {"at_most": 700}),
    ("FLUX edit through an engine at ratio 0.2, 28 steps, x the exact one", _warm_edit, {"at_least": 2.5}),
    ("FLUX first edit of a new picture at ratio 0.1, of the exact edit's time", _first_edit, {"at_most": 0.45}),
    ("copies of pages from the host, share of their time under kernels", _hidden_share, {"at_least": 0.9}),
    (
        "SDXL warm edit at ratio 0.2, x diffusers eager",
        _sdxl("diffusers_edit_s", "masked_edit_s"),
        {"at_least": 2.2},
    ),
    ("SDXL exact step, x diffusers eager", _sdxl("diffusers_ms", "exact_ms"), {"at_least": 1.3}),
    ("SDXL masked step, launches", _launches("sdxl", "masked"), {"at_most": 1950}),
    ("memory of CUDA graphs, GB", _graph_memory, {"at_most": 2}),
    ("a step of 8 edits up to its first kernel, ms", lambda s: s["overhead"]["total_ms"], {"at_most": 1}),
    ("tests of kernels on the GPU, 1 if all pass", _kernel_tests, {"at_least": 1}),
    ("edits in float32, least share of pixel values within 1 of 255 of a CPU's", _float32_share, {"at_least": 0.999}),
    ("the same of an edit by a server's own processes", lambda s: s["served"]["share_within_1"], {"at_least": 0.999}),
    ("pixel values that --offload host changes", lambda s: s["offload"]["differing"], {"at_most": 0}),
    ("embedded model in bfloat16, mean difference from a CPU's in levels of 255", _bfloat16_levels, {"at_most": 1}),
]
