"""Calibrates mask-aware execution for a checkpoint: `python -m entrypoints.calibrate --model M --images DIR --prompt P`

Runs edits of your images exact and mask-aware with the same seeds, and chooses the cheapest keyframes, page dtype, mask
margin and full steps whose pictures are similar enough, and then the fewest steps to compute with which they still are.
With --skip-levels it adds to an earlier calibration how similar prompts must be for approximate caching. Servers find
the saved result by the checkpoint's fingerprint; their flags for keyframes and page dtype override it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from core.cache_folder import user_cache_folder
from core.calibration import CALIBRATION, Calibration, calibration_file
from core.config import EMBEDDED_MODEL, Quantization
from core.errors import ConfigError, StencilError
from core.ipc.atomic_file import write_atomically
from core.ipc.logs import one_line
from core.model_info import ModelInfo
from core.skip_level import SkipLevel
from core.step_schedule import StepSchedule
from entrypoints.calibration.samples import find_images, make_samples
from entrypoints.calibration.search import Setting, Trial, describe_full_steps
from entrypoints.calibration.skip_levels import STATE_BYTES, StartEngine, measure_skip_levels
from entrypoints.calibration.trials import Trials
from entrypoints.image_engine import ImageEngine
from entrypoints.written_place import check_place

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "person.png"
EXAMPLE_PROMPTS = ("a red striped shirt", "a blue plain sweater", "a green checked coat", "a yellow dotted shirt")
SIMILAR_PROMPTS = (
    *("a red striped shirt", "red striped shirt", "a person in a red striped shirt"),
    *("a blue plain sweater", "blue plain sweater", "a person in a blue plain sweater"),
    *("a red striped sweater", "a green checked coat"),
)
"""Some that say the same in other words, and some that do not."""
UNSAFE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0; 1 after an error, printed as one line on stderr; 2 if no setting was close
    enough to exact execution.
    """
    args = _parse(argv)
    how = {name: getattr(args, name) for name in ("variant", "dtype", "quantization", "device")}

    def start(keyframes: str, dtype: str) -> ImageEngine:
        return ImageEngine(args.model, **how, cache_keyframes=keyframes, cache_dtype=dtype)

    def start_with_states(levels: Sequence[SkipLevel]) -> ImageEngine:
        return ImageEngine(args.model, **how, approximate_cache_bytes=STATE_BYTES, skip_levels=levels)

    try:
        if args.output is not None:
            check_place(args.output)
        if args.skip_levels:
            return _add_skip_levels(args, start_with_states)
        images, prompts = _images(args), _prompts(args)
        with Trials(start, args.steps, say=print) as trials:
            samples = make_samples(images, prompts, args.num_edits, trials.model)
            found = trials.search(samples, args.ssim_p10)
            calibration = _calibration(found, trials, args.ssim_p10)
            if calibration.safe and trials.model.can_skip_steps:
                steps = args.schedule_steps or [trials.num_inference_steps]
                schedules = [_schedule(found.setting, each, trials, args.ssim_p10) for each in sorted({*steps})]
                known = tuple(schedule for schedule in schedules if schedule is not None)
                calibration = msgspec.structs.replace(calibration, step_schedules=known)
            path = _save(calibration, args.output, trials.model)
    except (StencilError, OSError, ValueError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    print(f"{_verdict(calibration, args.ssim_p10)}\nsaved as {path}")
    return 0 if calibration.safe else UNSAFE


def _add_skip_levels(args: argparse.Namespace, start: StartEngine) -> int:
    """Measure the skip levels and add them to the calibration that there is. Raises ConfigError if there is none."""
    with start(()) as engine:
        model = engine.model
    known = _known(args, model)
    is_example = args.model == EMBEDDED_MODEL and args.prompt is None and args.prompts_file is None
    prompts = list(SIMILAR_PROMPTS) if is_example else _prompts(args)
    levels = measure_skip_levels(start, prompts, args.steps, args.ssim_p10, print)
    path = _save(msgspec.structs.replace(known, skip_levels=levels), args.output, model)
    print(f"saved as {path}")
    return 0


def _known(args: argparse.Namespace, model: ModelInfo) -> Calibration:
    """The calibration that servers find: the user's own, or that of the checkpoint. Raises ConfigError."""
    scheme = model.page_scheme
    paths = [calibration_file(user_cache_folder(os.environ), scheme.fingerprint)] if scheme is not None else []
    for path in (*paths, Path(args.model) / CALIBRATION):
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=Calibration)
    raise ConfigError(f"{model.name} has no calibration to add to; calibrate it without --skip-levels first")


def _images(args: argparse.Namespace) -> list[Path]:
    if args.images is not None:
        return find_images(args.images)
    if args.model != EMBEDDED_MODEL or not EXAMPLE.is_file():
        raise ConfigError("give --images, a folder of pictures such as your users edit")
    return [EXAMPLE]


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None:
        return [args.prompt]
    if args.prompts_file is not None:
        prompts = [line.strip() for line in args.prompts_file.read_text("utf-8").splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{args.prompts_file} holds no prompts; write one a line")
        return prompts
    if args.model != EMBEDDED_MODEL:
        raise ConfigError("give --prompt or --prompts-file, what to paint under the masks")
    return list(EXAMPLE_PROMPTS)


def _calibration(found: Trial, trials: Trials, target: float) -> Calibration:
    return Calibration(
        keyframes=trials.keyframes(found.setting) or "per-step",
        dtype=found.setting.dtype,
        full_steps=found.setting.full_steps,
        full_steps_from=round(found.full_steps_from, 4),
        mask_margin=found.setting.margin,
        safe=found.reaches(target),
        ssim_mean=round(found.ssim_mean, 5),
        ssim_p10=round(found.ssim_p10, 5),
        num_edits=found.num_edits,
        num_inference_steps=trials.num_inference_steps,
    )


def _schedule(setting: Setting, num_steps: int, trials: Trials, target: float) -> StepSchedule | None:
    """The step schedule for this number of steps; None if every step is needed."""
    found = trials.search_steps(setting, num_steps, target)
    if found is None:
        print(f"{num_steps} steps: all of them are needed")
        return None
    computed = found.setting.computed
    assert computed is not None
    print(f"{num_steps} steps, {len(computed)} of them computed: {found.describe(num_steps)}")
    return StepSchedule(
        num_inference_steps=num_steps,
        computed=computed,
        full_steps=tuple(computed[place] for place in found.setting.own_page_steps_of(found.setting.full_from)),
        full_steps_from=round(found.full_steps_from, 4),
        ssim_mean=round(found.ssim_mean, 5),
        ssim_p10=round(found.ssim_p10, 5),
    )


def _save(calibration: Calibration, output: Path | None, model: ModelInfo) -> Path:
    """Write to `output`, or by default to the file where this user's servers look for it; returns the path."""
    data = msgspec.json.format(msgspec.json.encode(calibration)) + b"\n"
    if output is not None:
        output.write_bytes(data)
        return output
    assert model.page_scheme is not None
    path = calibration_file(user_cache_folder(os.environ), model.page_scheme.fingerprint)
    write_atomically(path, data)
    return path


def _verdict(found: Calibration, target: float) -> str:
    if not found.safe:
        return (
            f"mask-aware execution is unsafe for this checkpoint: SSIM p10 {found.ssim_p10:.4f} at best, below"
            f" {target}; servers will compute every token"
        )
    keyframes = found.keyframes if isinstance(found.keyframes, str) else f"{len(found.keyframes)} keyframes"
    return (
        f"chosen: {keyframes}, {found.dtype} pages, margin {found.mask_margin} px,"
        f" {describe_full_steps(found.full_steps, found.full_steps_from)}: SSIM {found.ssim_mean:.4f}, p10"
        f" {found.ssim_p10:.4f} or better for masks of every size, over {found.num_edits} edits of"
        f" {found.num_inference_steps} steps"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m entrypoints.calibrate",
        description="Choose keyframes, page dtype, margin and full steps for a checkpoint, on your own images.",
        epilog="Exit status 2: no setting was close enough; servers then compute every token.",
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers directory or hub id (default: embedded)")
    parser.add_argument("--images", type=Path, help="folder of pictures; name_mask.png is the mask of name.*")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="what to paint under every mask")
    prompts.add_argument("--prompts-file", type=Path, help="file of prompts, one per line, used in turn")
    parser.add_argument("--num-edits", type=_positive, default=32, help="edits to compare (default: 32)")
    parser.add_argument("--steps", type=_positive, help="denoising steps (default: the model's own)")
    parser.add_argument(
        "--schedule-steps",
        type=_positive,
        nargs="+",
        metavar="N",
        help="numbers of steps to find step schedules for (default: that of --steps)",
    )
    parser.add_argument(
        "--ssim-p10",
        type=float,
        default=0.96,
        help="SSIM that nine of ten edits must reach in each class of mask sizes (default: 0.96)",
    )
    parser.add_argument(
        "--skip-levels",
        action="store_true",
        help="measure only how many steps pictures may skip by approximate caching, at which similarity of their "
        "prompts, and add it to the calibration there is; give prompts of which some are alike (--prompts-file)",
    )
    parser.add_argument("--output", type=Path, help="file to write (default: where this user's servers look)")
    parser.add_argument("--variant", default="", help="variant of the weight files, as for the server")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", default="none", choices=get_args(Quantization), help="as for the server")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
