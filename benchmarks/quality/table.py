"""Quality and speed of mask-aware edits as one knob at a time moves away from what is shipped."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from benchmarks.quality.edits import Likeness, Machine, Setting, aware_params, make_edit, pixels, run_aware
from core.model_info import ModelInfo
from core.request import SamplingParams
from entrypoints import EditResult, ImageEngine
from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import Pixels

KEYFRAMES = ("2", "3", "5", "9", "per-step")
DTYPES = ("int8", "bfloat16", "float32")
MARGINS = (0, 4, 8, 16)  # px
FULL_STEPS = (0, 1, 2)
CHEAPEST = Setting("2", "int8", 0, 0)
DEAREST = Setting("per-step", "float32", 16, 2)

TIMED_EDITS = 5


@dataclass(frozen=True)
class Row:
    """One setting at one number of steps. denoise_ratio, edit_ratio: of a lone warm edit's time, denoising alone and as
    its caller sees it, to the exact mode's; medians of TIMED_EDITS edits that ran in turn with exact ones. page_bytes:
    of one template.
    """

    setting: Setting
    steps: int
    likeness: Likeness
    active_ratio: float
    denoise_ratio: float
    edit_ratio: float
    page_bytes: int


def settings_around(default: Setting) -> list[Setting]:
    """The default, its neighbours one knob at a time, and both ends; those that share an engine lie together."""
    varied = [
        default,
        *(replace(default, keyframes=value) for value in KEYFRAMES),
        *(replace(default, dtype=value) for value in DTYPES),
        *(replace(default, margin=value) for value in MARGINS),
        *(replace(default, full_steps=value) for value in FULL_STEPS),
        CHEAPEST,
        DEAREST,
    ]
    return sorted(dict.fromkeys(varied), key=lambda setting: setting.server != default.server)


def shipped_setting(model: ModelInfo) -> Setting:
    """What a server without flags uses for this model; full steps go by the mask ratio."""
    scheme = model.page_scheme
    if scheme is None:
        raise SystemExit("this model is served without mask-aware execution; there is nothing to compare")
    keyframes = str(len(scheme.keyframes)) if scheme.keyframes else "per-step"
    return Setting(keyframes, scheme.layout.dtype, scheme.mask_margin)


def measure_table(
    machine: Machine, asked: Sequence[Case], exact: dict[int, list[Pixels]], settings: Sequence[Setting]
) -> Iterator[Row]:
    """Rows for every setting and number of steps; `exact` holds the exact pictures by steps."""
    for _, group in groupby(settings, key=lambda setting: setting.server):
        alike = list(group)
        with machine.engine(alike[0]) as engine:
            for setting in alike:
                for steps, pictures in exact.items():
                    yield _measure(engine, asked, pictures[: len(asked)], setting, steps)


def _measure(engine: ImageEngine, asked: Sequence[Case], exact: Sequence[Pixels], setting: Setting, steps: int) -> Row:
    results = run_aware(engine, asked, steps, setting)
    denoise_ratio, edit_ratio = _time(engine, asked[-TIMED_EDITS:], setting, steps)
    return Row(
        setting=setting,
        steps=steps,
        likeness=Likeness.of(asked, exact, [pixels(result) for result in results]),
        active_ratio=statistics.mean(result.reports[0].mask_ratio for result in results),
        denoise_ratio=denoise_ratio,
        edit_ratio=edit_ratio,
        page_bytes=_page_bytes(engine.model, results[0], steps),
    )


def _time(engine: ImageEngine, asked: Sequence[Case], setting: Setting, steps: int) -> tuple[float, float]:
    """Mask-aware over exact, of lone edits in turn: (denoising, whole edit)."""
    exact = SamplingParams(seed=0, num_inference_steps=steps, mask_aware=False)
    aware = aware_params(setting, 0, steps)
    for case in asked:
        _lone_edit(engine, case, aware)  # its pages are there now
    times = [(_lone_edit(engine, case, exact), _lone_edit(engine, case, aware)) for case in asked]
    denoise, whole = zip(*((a.denoise / e.denoise, a.whole / e.whole) for e, a in times), strict=True)
    return statistics.median(denoise), statistics.median(whole)


@dataclass(frozen=True)
class _Times:
    denoise: float  # seconds
    whole: float


def _lone_edit(engine: ImageEngine, case: Case, params: SamplingParams) -> _Times:
    start = time.perf_counter()
    (result,) = engine.generate([make_edit(case)], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if result.error is not None:
        raise result.error
    return _Times(result.reports[0].ms["denoise"] / 1e3, seconds)


def _page_bytes(model: ModelInfo, result: EditResult, steps: int) -> int:
    assert model.page_scheme is not None
    scheme = model.page_scheme
    return scheme.template_bytes(result.reports[0].image_tokens, len(scheme.keyframes) or steps)


def table_markdown(rows: Sequence[Row], default: Setting) -> str:
    """One line a row; the default is bold."""
    lines = [
        "| steps | keyframes | pages | margin px | full steps | active | SSIM in box mean / p10 / min | whole |"
        " colour, pattern | denoising | edit | pages MB |",
        "| --- " * 12 + "|",
    ]
    for row in sorted(rows, key=lambda row: row.steps):
        cells = _cells(row)
        if row.setting == default:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    s, like = row.setting, row.likeness
    return [
        str(row.steps),
        s.keyframes,
        s.dtype,
        str(s.margin),
        "by ratio" if s.full_steps is None else str(s.full_steps),
        f"{row.active_ratio:.3f}",
        f"{like.mean:.4f} / {like.p10:.4f} / {like.in_box.min():.3f}",
        f"{like.whole.mean():.4f}",
        f"{like.colour:+.1f}, {like.pattern:+.1f}",
        f"{row.denoise_ratio:.2f}x",
        f"{row.edit_ratio:.2f}x",
        f"{row.page_bytes / 1e6:.1f}",
    ]
