"""Hashes of the pictures that one source tree makes, as one line of JSON: {family/dtype/edit: hash}.

Run as a file with PYTHONPATH set to the tree, which may be older than this file. So it uses only those parts of the
public offline API that do not change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from core.errors import ConfigError
from entrypoints import Edit, ImageEngine, SamplingParams

STEPS = 4
DTYPES = ("float32", "bfloat16")
RANKS = (2, 3)
PARAMETERS = inspect.signature(ImageEngine.__init__).parameters
HAS_RANKS, HAS_DEGREES = "workers_per_engine" in PARAMETERS, "degree" in PARAMETERS
OF_CLASSES = ("dit",)
"""Families that make pictures of a class. Trees without `class_label` do not serve them."""
HAS_CLASSES = "class_label" in Edit.__dataclass_fields__
UNETS = ("sd", "sd_inpaint", "sdxl")
"""Families whose edits read their template's pages only."""
HAS_OWN_PAGES = "own_page_steps" in SamplingParams.__struct_fields__
ON_SEVERAL_RANKS = ("embedded", "sd_inpaint", "dit")
"""Families whose pictures are also made by engines with several workers, in float32; those of all families by two that
compute each step together."""
Case = tuple[str, Edit, SamplingParams]
"""Name, edit and how it is sampled."""
COMMON: dict[str, Any] = {"num_inference_steps": STEPS, "seed": 7}
GUIDED: dict[str, Any] = {"guidance_scale": 3.0, "true_cfg_scale": 2.5, "negative_prompt": "a hat"}
"""Families use what they support: distilled guidance, classifier-free guidance, or both."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path, help="picture to edit")
    parser.add_argument("models", nargs="+", help="NAME=DIRECTORY of each family; NAME= is the embedded model")
    args = parser.parse_args()
    found: dict[str, str] = {}
    for model in args.models:
        name, _, path = model.partition("=")
        if name in OF_CLASSES and not HAS_CLASSES:
            continue
        asked = of_classes() if name in OF_CLASSES else cases(args.image, name not in UNETS and HAS_OWN_PAGES)
        try:
            found |= of_family(name, path, asked)
        except ConfigError as error:
            if "pipeline class" not in str(error):
                raise
            print(f"this tree does not serve {name}", file=sys.stderr)
    print(json.dumps(found))


def of_family(name: str, path: str, asked: Sequence[Case]) -> dict[str, str]:
    """The hashes of all engines that serve a family."""
    return {
        f"{kind}/{edit}": digest
        for dtype in DTYPES
        for kind, settings in engines(name, dtype).items()
        for edit, digest in hashes(path, dtype, asked, settings)
    }


def engines(name: str, dtype: str) -> dict[str, dict[str, int]]:
    """Start of the names of its pictures -> settings, of every engine that is to serve this family."""
    kind = f"{name}/{dtype}"
    found: dict[str, dict[str, int]] = {kind: {}}
    several = RANKS if name in ON_SEVERAL_RANKS and dtype == "float32" else ()
    if HAS_RANKS:
        found |= {f"{kind}/{ranks} ranks": {"workers_per_engine": ranks} for ranks in several}
    if HAS_DEGREES:
        joint = {ranks: {"workers_per_engine": ranks, "degree": ranks} for ranks in {2, *several}}
        found |= {f"{kind}/{ranks} joint ranks": settings for ranks, settings in joint.items()}
    return found


def hashes(path: str, dtype: str, asked: Sequence[Case], flags: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(edit, hash) of every edit alone, and once more with all of them in one batch.

    The second time every template is cached, so each mask-aware edit is hashed both cold and warm.
    """
    settings: dict[str, Any] = {"model": path, **flags} if path else {**flags}
    names, edits, samplings = zip(*asked, strict=True)
    with ImageEngine(**settings, dtype=dtype, image_workers=1) as engine:
        for name, edit, sampling in zip(names, edits, samplings, strict=True):
            yield f"{name}/alone", _digest(engine.generate([edit], sampling, use_tqdm=False)[0])
        together = engine.generate(list(edits), list(samplings), use_tqdm=False)
        yield from ((f"{name}/together", _digest(result)) for name, result in zip(names, together, strict=True))


def of_classes() -> list[Case]:
    """Pictures of classes, with guidance and without, of other numbers of steps."""
    plain = SamplingParams(**COMMON, guidance_scale=1.0)
    longer = SamplingParams(**COMMON | {"num_inference_steps": STEPS + 2})
    classes: dict[str, dict[str, Any]] = {"plain": {"class_label": 3}, "guided": {"class_label": 207}}
    samplings = {"plain": plain, "guided": SamplingParams(**COMMON)}
    found = [(name, Edit(**asked), samplings[name]) for name, asked in classes.items()]
    return [*found, ("longer", Edit(**classes["plain"]), longer)]


def cases(image: Path, has_own_pages: bool) -> list[Case]:
    """Edits under a box, exact and mask-aware: plain, guided, weaker, of a picture with odd sides; one from nothing.
    has_own_pages: also over pages of their own."""
    picture, odd = _resized(image, (128, 128)), _resized(image, (150, 99))
    plain = Edit(prompt="a red striped shirt", image=picture, mask_image=_box(picture))
    found: list[Case] = []
    for is_masked in (False, True):
        kind = "mask_aware" if is_masked else "exact"
        sampling = SamplingParams(**COMMON, mask_aware=is_masked)
        guided = SamplingParams(**COMMON, mask_aware=is_masked, **GUIDED)
        weaker = SamplingParams(**COMMON, mask_aware=is_masked, strength=0.6)
        with_full_steps = SamplingParams(**COMMON, mask_aware=is_masked, full_steps=2)
        found += [
            (f"{kind}/plain", plain, sampling),
            (f"{kind}/guided", plain, guided),
            (f"{kind}/weaker", plain, weaker),
            (f"{kind}/full_steps", plain, with_full_steps),
            (f"{kind}/odd", dataclasses.replace(plain, image=odd, mask_image=_box(odd)), sampling),
        ]
    if has_own_pages:
        found += [
            ("own_pages/plain", plain, SamplingParams(**COMMON, own_page_steps=(0, 2))),
            ("own_pages/guided", plain, SamplingParams(**COMMON, own_page_steps=(0,), **GUIDED)),
        ]
    generation = Edit(prompt="a blue plain coat", size=(128, 128))
    found.append(("generation", generation, SamplingParams(**COMMON)))
    if "hires_scale" in SamplingParams.__struct_fields__:
        hires = SamplingParams(**COMMON, hires_scale=2.0, hires_strength=0.6)
        found += [("hires/edit", plain, hires), ("hires/generation", generation, hires)]
    return found


def _resized(image: Path, size: tuple[int, int]) -> Image.Image:
    with Image.open(image) as opened:
        return opened.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _box(picture: Image.Image) -> Image.Image:
    """White where to edit: a box of a fifth of each side, left of the middle."""
    width, height = picture.size
    mask = np.zeros((height, width), np.uint8)
    mask[height * 2 // 5 : height * 4 // 5, width // 5 : width * 2 // 5] = 255
    return Image.fromarray(mask)


def _digest(result: Any) -> str:
    if result.error is not None:
        raise result.error
    pixels: Sequence[Image.Image] = result.images
    return hashlib.sha256(b"".join(image.tobytes() for image in pixels)).hexdigest()[:16]


if __name__ == "__main__":
    main()
