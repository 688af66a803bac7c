"""docs/gpu.md: every figure of it comes out of the file of results, or is computed from shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence.document import table
from benchmarks.gpu import text
from benchmarks.gpu.bars import bars
from benchmarks.gpu.report import Figures, read
from benchmarks.gpu.sizes import FULL
from core.page_scheme import PageLayout

RESULTS, DOCUMENT = "gpu_results.json", "gpu.md"

FLUX_BLOCKS, FLUX_HEADS, FLUX_HEAD_DIM = 57, 24, 128
"""Of FLUX.1-dev: 19 double and 38 single blocks."""
MEMORY_BYTES_PER_SECOND, LINK_BYTES_PER_SECOND = 4e12, 50e9
"""An H200's memory, and PCI Express 5 with 16 lanes, about."""
TFLOP_PER_SECOND = 800.0
"""An H200's products in bfloat16, about."""
HOST_RATIO = 0.1
"""Mask ratio of the step whose operations are held against the host's time."""


def write_document(folder: Path) -> None:
    """From the folder's results, if there are any."""
    (folder / DOCUMENT).write_text(render(read(folder / RESULTS)))


def render(results: Figures | None) -> str:
    """Markdown. results: None where nothing was run."""
    parts = [text.HEAD, *([] if _is_of_a_gpu(results) else [text.NOT_RUN]), text.HOW, _expected()]
    if results is not None:
        parts += [_machine(results["about"]), _bars(results["sections"])]
        parts += [part(results["sections"][name]) for name, part in _PARTS.items() if name in results["sections"]]
    return "\n".join(parts).rstrip() + "\n"


def _is_of_a_gpu(results: Figures | None) -> bool:
    return results is not None and results["about"]["device_type"] == "cuda"


def _expected() -> str:
    """Bounds of FLUX's shape at full size."""
    size = FULL.flux
    tokens = size.image_tokens + size.text_tokens
    active = {ratio: round(ratio * size.image_tokens) for ratio in size.ratios if ratio < 1}
    rows = [[f"{ratio:g}", f"{n}", f"{tokens / (n + size.text_tokens):.2f}x"] for ratio, n in active.items()]
    layout = PageLayout(num_blocks=FLUX_BLOCKS, num_heads=FLUX_HEADS, head_dim=FLUX_HEAD_DIM, dtype="int8")
    entry = layout.entry_bytes(size.image_tokens)
    about = text.EXPECT.format(page_ms=1e3 * 2 * entry / MEMORY_BYTES_PER_SECOND)
    pages = text.EXPECT_PAGES.format(
        entry_gb=entry / 1e9,
        load_ms=1e3 * entry / LINK_BYTES_PER_SECOND,
        steps=size.steps,
        steps_per_keyframe=size.steps / (size.keyframes - 1),
    )
    step_tflop = _tflop(active[HOST_RATIO] + size.text_tokens, tokens)
    host = text.EXPECT_HOST.format(tflop=step_tflop, step_ms=1e3 * step_tflop / TFLOP_PER_SECOND)
    title = f"FLUX.1-dev, 1024 px, {size.text_tokens} text tokens: mask ratio"
    return f"{about}\n{table([title, 'active tokens', 'a step can be faster by'], rows)}{host}{pages}"


def _tflop(queries: int, keys: int) -> float:
    """Of a step of FLUX.1-dev."""
    hidden = FLUX_HEADS * FLUX_HEAD_DIM
    return 2 * queries * FLUX_BLOCKS * (12 * hidden**2 + 2 * keys * hidden) / 1e12


# ---------------------------------------------------------------------------------------------------- what was measured


def _machine(about: Figures) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    lines = text.MACHINE.format(**(about | {"versions": versions, "cuda": about["cuda"] or "none"}))
    is_real = about["device_type"] == "cuda" and about["size"] == FULL.name
    return lines if is_real else f"{lines}\n{text.NOT_A_GPU.format(**about)}"


def _bars(sections: Mapping[str, Any]) -> str:
    rows = [
        [bar.name, "" if bar.measured is None else f"{bar.measured:.3g}", bar.target, bar.verdict]
        for bar in bars(sections)
    ]
    return "### Bars\n\n" + table(["", "measured", "target", ""], rows)


def _steps(figures: Figures) -> str:
    ratios = sorted({ratio for batch in figures["batches"].values() for ratio in batch["ratios"]}, key=float)
    rows = [
        [
            batch,
            f"{one['diffusers_ms']:.1f}",
            _ms(one.get("diffusers_compiled_ms")),
            f"{one['exact_ms']:.1f} ({one['exact_tflops']:.0f} TFLOP/s)",
            _ms(one.get("launch_ms")),
            *(_step(one, one["ratios"].get(ratio)) for ratio in ratios),
        ]
        for batch, one in figures["batches"].items()
    ]
    head = ["batch, ms", "diffusers eager", "diffusers compiled", "Stencil exact", "launched in"]
    return f"{text.STEPS.format(**figures)}\n{table([*head, *(f'ratio {r}' for r in ratios)], rows)}"


def _step(batch: Figures, step: Figures | None) -> str:
    if step is None:
        return ""
    if (compiled := batch.get("diffusers_compiled_ms")) is None:
        return f"{step['ms']:.1f}"
    faster = compiled / step["ms"]
    return f"{step['ms']:.1f}: {faster:.2f}x ({faster / step['bound']:.2f})"


def _cold(figures: Figures) -> str:
    rows = [["exact step", f"{figures['exact_step_ms']:.1f} ms"]]
    rows += [[f"pages of {figures['keyframes']} keyframes", f"{figures['prime_ms']:.1f} ms"]]
    if "cold_edit_s" in figures:
        share = figures["cold_edit_s"] / figures["exact_edit_s"]
        rows += [
            [f"exact edit, {figures['steps']} steps", f"{figures['exact_edit_s']:.2f} s"],
            [
                f"first edit at mask ratio {figures['ratio']:g}",
                f"{figures['cold_edit_s']:.2f} s: {share:.2f} of it, by operations of the denoiser "
                f"{figures['cold_bound']:.2f}",
            ],
        ]
    return f"{text.COLD}\n{table(['', ''], rows)}"


def _host(figures: Figures) -> str:
    rows = [
        [
            ratio,
            f"{one['device_step_ms']:.2f}",
            f"{one['host_step_ms']:.2f}: {one['host_step_ms'] / one['device_step_ms']:.3f}x",
            f"{one['hidden_share']:.2f} of {one['copy_ms']:.0f} ms" if "copy_ms" in one else "",
        ]
        for ratio, one in figures.get("ratios", {}).items()
    ]
    head = ["mask ratio", "step, ms, pages on the device", "from the host", "copies under kernels"]
    return f"{text.HOST.format(**figures)}\n{table(head, rows)}"


def _sdxl(figures: Figures) -> str:
    names = {
        "diffusers": "diffusers eager",
        "diffusers_compiled": "diffusers compiled",
        "exact": "Stencil, exact",
        "masked": "Stencil, mask-aware",
        "masked_compiled": "the same with `--kernels compile`",
    }
    rows = [
        [title, _ms(figures.get(f"{name}_ms")), _seconds(figures.get(f"{name}_edit_s"))]
        for name, title in names.items()
    ]
    launched = [_ms(figures.get(name)) for name in ("launch_ms", "launch_compiled_ms")]
    rows += [["the host launches a mask-aware step, and compiled, in", ", ".join(filter(None, launched)), ""]]
    return f"{text.SDXL.format(**figures)}\n{table(['', 'step, ms', 'edit, s'], rows)}"


def _correctness(figures: Figures) -> str:
    rows = [
        [name, *map(_levels, one.values()), f"{_worst(one['float32'], 'share_within_1', min):.5f}"]
        for name, one in figures["checkpoints"].items()
    ]
    head = ["checkpoint", "float32: mean, largest", "bfloat16: mean, largest", "float32: share within 1"]
    return f"{text.CORRECTNESS}\n{table(head, rows)}"


def _levels(ways: Mapping[str, Figures]) -> str:
    return f"{_worst(ways, 'mean_levels', max):.3f}, {_worst(ways, 'max_levels', max):.0f}"


def _served(figures: Figures) -> str:
    rows = [
        ["from its start until it serves", f"{figures['ready_s']:.1f} s"],
        ["device memory for pages", f"{figures['device_page_gb']:.1f} GB"],
        ["pages of the second edit of a picture", figures["second_edit"]],
    ]
    if "share_within_1" in figures:
        rows.append(["pixel values within 1 of 255 of a CPU's", f"{figures['share_within_1']:.5f}"])
    return f"{text.SERVED}\n{table(['', ''], rows)}"


def _attention(figures: Figures) -> str:
    rows = [
        [shape, way, f"{ms:.3f}", f"{one['tflop'] / ms * 1e3:.0f}", f"{one['new_shape_ms'][way]:.1f}"]
        for shape, one in figures.get("shapes", {}).items()
        for way, ms in one["ms"].items()
    ]
    rows += [
        [f"whole step of {batch}, {figures['ratio']:g}", way, f"{ms:.1f}", "", ""]
        for batch, ways in figures.get("steps", {}).items()
        for way, ms in ways.items()
    ]
    head = ["mask ratio", "way", "ms", "TFLOP/s", "first call of a new shape, ms"]
    return f"{text.ATTENTION.format(**figures)}\n{table(head, rows)}"


def _kernel_tests(figures: Figures) -> str:
    return f"{text.KERNEL_TESTS}\n```\n{figures['said']}\n```\n"


def _worst(ways: Mapping[str, Figures], name: str, pick: Callable[[Iterable[float]], float]) -> float:
    return pick(way[name] for way in ways.values())


def _overhead(figures: Figures) -> str:
    rows = [["scheduler, plan and result between processes", f"{figures['schedule_ring_apply_ms']:.3f} ms"]]
    if "runner_ms" in figures:
        rows += [["runner, up to the forward pass", f"{figures['runner_ms']:.3f} ms"]]
        rows += [["together", f"{figures['total_ms']:.3f} ms"]]
    return f"{text.OVERHEAD}\n{table(['', ''], rows)}"


def _skipped(figures: Figures) -> str:
    return f"{text.SKIPPED}\n" + "".join(f"- `{name}`: {why}\n" for name, why in figures.items())


def _broken(figures: Figures) -> str:
    traces = [f"`{name}`:\n\n```\n{trace.rstrip()}\n```\n" for name, trace in figures.items()]
    return "\n".join([text.BROKEN, *traces])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_PARTS: dict[str, Callable[[Figures], str]] = {
    "flux_steps": _steps,
    "flux_cold": _cold,
    "flux_host_pages": _host,
    "sdxl": _sdxl,
    "overhead": _overhead,
    "correctness": _correctness,
    "served": _served,
    "attention": _attention,
    "kernel_tests": _kernel_tests,
    "skipped": _skipped,
    "broken": _broken,
}
