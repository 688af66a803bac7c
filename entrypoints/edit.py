"""Runs one edit from the command line: `python -m entrypoints.edit in.png --mask m.png --prompt "a cap" -o out.png`"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from PIL import Image

from core.config import EMBEDDED_MODEL
from core.errors import StencilError
from core.ipc.logs import one_line
from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, ImageEngine

_WITH_ALPHA, _WITHOUT_ALPHA = (".png", ".webp"), (".jpg", ".jpeg")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status: 0, or 1 after an error, printed as one line on stderr."""
    args = _parse(argv)
    try:
        edit = Edit(
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
        )
        _check_output(args.output)
        sampling = SamplingParams(num_inference_steps=args.num_inference_steps, seed=args.seed)
        model = {"dtype": args.dtype, "device": args.device, "segmenter": args.segmenter}
        with ImageEngine(args.model, **model) as engine:
            (result,) = engine.generate([edit], sampling, use_tqdm=False)
        if result.error is not None:
            raise result.error
        save(result.images[0], args.output)
    except (StencilError, OSError, ValueError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    print(f"{args.output}  seed {result.seeds[0]}  mask ratio {result.reports[0].mask_ratio:.2f}")
    return 0


def _check_output(path: Path) -> None:
    """Raises ValueError or OSError if `path` cannot be written; called first, since an edit may take minutes."""
    if path.suffix.lower() not in (*_WITH_ALPHA, *_WITHOUT_ALPHA):
        raise ValueError(f"cannot write '{path}': its name must end in .png, .webp, .jpg or .jpeg")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write '{path}': {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"cannot write '{path}': permission denied")


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
    """Numbers with commas between them."""
    return tuple(float(each) for each in text.split(","))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m entrypoints.edit", description="Edit one picture.")
    parser.add_argument("image", type=Path, help="the picture: PNG, WebP or JPEG")
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
    parser.add_argument("--prompt", required=True, help="what to paint under the mask")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write; its suffix sets the format")
    parser.add_argument("--num-inference-steps", type=int, help="denoising steps (default: the model's own)")
    parser.add_argument("--seed", type=int, help="seed of the noise (default: random)")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers directory or hub id (default: embedded)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
