"""Runs one edit from the command line: `python -m entrypoints.edit in.png --mask m.png --prompt "a cap" -o out.png`

Or a workflow: `python -m entrypoints.edit --workflow safety.py --input image=@in.png -o out.png`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from core.config import EMBEDDED_MODEL, ModelConfig
from core.errors import InvalidRequestError, StencilError
from core.graph.workflow import Workflow
from core.ipc.logs import one_line
from core.run_class import RunClass
from core.sampling_params import SamplingParams
from entrypoints.class_inputs import ClassInput, class_inputs
from entrypoints.image_engine import Edit, EditResult, ImageEngine
from entrypoints.workflow_command import given_inputs, places_of, read_workflow
from entrypoints.written_place import check_place

_WITH_ALPHA, _WITHOUT_ALPHA = (".png", ".webp"), (".jpg", ".jpeg")
_OF_ALL = ("workflow", "input", "output", "model", "dtype", "device")
"""Arguments that mean something to workflows of users' classes alone; the others are of edits."""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status: 0, or 1 after an error, printed as one line on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        print(_edit(args) if args.workflow is None else json.dumps(_run(parser, args)))
    except (StencilError, OSError, ValueError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


def _edit(args: argparse.Namespace) -> str:
    """Edit the picture, and write it; what to print. Raises StencilError, OSError, ValueError."""
    if args.input:
        raise InvalidRequestError("Invalid '--input': a workflow takes inputs; name its file by --workflow.")
    _require(args, "image", "prompt", "output")
    edit = _edit_of(args, {})
    _check_picture(args.output)
    result = _made(args, edit)
    save(result.images[0], args.output)
    return f"{args.output}  seed {result.seeds[0]}  mask ratio {result.reports[0].mask_ratio:.2f}"


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    """Run the workflow, alone or as that of the model, and write what it makes; what to print. Raises StencilError,
    OSError, ValueError.
    """
    workflow, classes = read_workflow(args.workflow)
    inputs = given_inputs(workflow, args.input)
    class_inputs(workflow, inputs)  # what is missing, or cannot be read, is refused before a model is loaded
    asked: Edit | dict[str, ClassInput] = inputs
    is_alone = not workflow.is_for_pictures
    if is_alone:
        _refuse_edits(parser, args, workflow.name)
    else:
        _require(args, "prompt")
        asked = _edit_of(args, inputs)
    places = places_of(workflow, args.output)
    for path in places.values():
        check_place(path) if path.suffix == ".npy" else _check_picture(path)
    result = _made(args, asked, workflow, classes)
    values = {**result.values, **({} if is_alone else {"picture": result.images[0]})}
    for name, path in places.items():
        _write(values.pop(name), path)
    return {"files": {name: str(path) for name, path in places.items()}, "values": values}


def _made(
    args: argparse.Namespace,
    asked: Edit | dict[str, ClassInput],
    workflow: Workflow | None = None,
    classes: Sequence[RunClass] = (),
) -> EditResult:
    """What the model makes of an Edit, or the workflow of its inputs. Raises StencilError."""
    sampling = SamplingParams(num_inference_steps=args.num_inference_steps, seed=args.seed)
    name = "" if workflow is None else workflow.name
    is_alone = not isinstance(asked, Edit)
    model = ModelConfig(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        segmenter=tuple(args.segmenter),
        workflow="" if is_alone else name,
    )
    workflows = () if workflow is None else (workflow,)
    with ImageEngine(models=[model], classes=classes, workflows=workflows) as engine:
        (result,) = engine.generate([asked], sampling, model=name if is_alone else "", use_tqdm=False)
    if result.error is not None:
        raise result.error
    return result


def _edit_of(args: argparse.Namespace, inputs: dict[str, ClassInput]) -> Edit:
    return Edit(
        prompt=args.prompt,
        image=args.image,
        references=args.reference,
        mask=args.mask,
        mask_image=args.mask_image,
        mask_prompt=args.mask_prompt,
        mask_points=tuple(args.mask_point),
        mask_box=args.mask_box,
        mask_grow=args.mask_grow,
        mask_feather=args.mask_feather,
        padding_mask_crop=args.padding_mask_crop,
        inputs=inputs,
    )


def _require(args: argparse.Namespace, *names: str) -> None:
    """Raises InvalidRequestError for an argument that is missing."""
    for name in names:
        if getattr(args, name) is None:
            raise InvalidRequestError(f"Missing '{_shown(name)}': an edit needs it.")


def _refuse_edits(parser: argparse.ArgumentParser, args: argparse.Namespace, workflow: str) -> None:
    """Raises InvalidRequestError for an argument that would be lost."""
    for name, value in vars(args).items():
        if name not in _OF_ALL and value != parser.get_default(name):
            problem = f"workflow '{workflow}' takes all that it needs by --input; leave it out"
            raise InvalidRequestError(f"Invalid '{_shown(name)}': {problem}.")


def _shown(name: str) -> str:
    """An argument as one writes it."""
    return name if name == "image" else f"--{name.replace('_', '-')}"


def _check_picture(path: Path) -> None:
    """Raises ValueError or OSError if no picture can be written to `path`; asked first, as an edit may take minutes."""
    if path.suffix.lower() not in (*_WITH_ALPHA, *_WITHOUT_ALPHA):
        raise ValueError(f"cannot write '{path}': its name must end in .png, .webp, .jpg or .jpeg")
    check_place(path)


def _write(value: object, path: Path) -> None:
    """Write a tensor, uint8 pixels [height, width, 3] or a picture."""
    if path.suffix == ".npy":
        np.save(path, cast(np.ndarray[tuple[int, ...], np.dtype[np.generic]], value))
    else:
        save(value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value)), path)


def save(image: Image.Image, path: Path) -> None:
    """Write `image` in the format of the suffix, with the server's default quality: PNG and WebP are lossless; JPEG,
    which has no transparency, is flattened onto white.
    """
    match path.suffix.lower():
        case ".png":
            image.save(path)
        case ".webp":
            image.save(path, lossless=True, exact=True)  # exact: also keep colours under alpha 0
        case _:
            _flattened(image).save(path, quality=100, subsampling=0)


def _flattened(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 120,90") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m entrypoints.edit", description="Edit one picture, or run one workflow of your own."
    )
    parser.add_argument("image", type=Path, nargs="?", help="the picture to edit: PNG, WebP or JPEG")
    reference_help = "a further picture to look at, for models that see them; may be given several times"
    parser.add_argument("--reference", type=Path, action="append", default=[], help=reference_help)
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--mask", type=Path, help="mask of the picture's size: transparent = edit")
    masks.add_argument("--mask-image", type=Path, help="mask of the picture's size: white = edit")
    masks.add_argument("--mask-prompt", help="what to edit, in words, instead of a mask")
    point_help = "a point of what to edit, X,Y in pixels, or X,Y,-1 of what to leave out; may be given several times"
    parser.add_argument("--mask-point", type=_numbers, action="append", default=[], metavar="X,Y", help=point_help)
    box_help = "a box around what to edit, in pixels"
    parser.add_argument("--mask-box", type=_numbers, metavar="LEFT,TOP,RIGHT,BOTTOM", help=box_help)
    parser.add_argument("--mask-grow", type=int, default=0, help="pixels by which the mask is grown (default: 0)")
    parser.add_argument("--mask-feather", type=float, default=0.0, help="pixels over which its edge is softened (0)")
    parser.add_argument("--segmenter", action="append", default=[], help="checkpoint that finds masks; see serve")
    crop_help = "edit only the mask's box, grown by this many pixels, at the model's resolution (default: whole image)"
    parser.add_argument("--padding-mask-crop", type=int, help=crop_help)
    parser.add_argument("--prompt", help="what to paint under the mask")
    workflow_help = "file of one workflow to run, or to edit by; what it makes is printed as JSON"
    parser.add_argument("--workflow", type=Path, metavar="FILE", help=workflow_help)
    input_help = "an input of the workflow: NAME=VALUE, a picture NAME=@FILE, a tensor NAME=@FILE.npy; repeatable"
    parser.add_argument("--input", action="append", default=[], metavar="NAME=VALUE", help=input_help)
    output_help = "picture to write; its suffix sets the format. Other pictures, and tensors, are written beside it"
    parser.add_argument("-o", "--output", type=Path, help=output_help)
    parser.add_argument("--num-inference-steps", type=int, help="denoising steps (default: the model's own)")
    parser.add_argument("--seed", type=int, help="seed of the noise (default: random)")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers directory or hub id (default: embedded)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
