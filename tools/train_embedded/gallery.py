"""Stage `gallery`: the playground's example templates, with a mask for each garment and prompts that fit it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.train_embedded import seeds
from tools.train_embedded.captions import noun_phrase
from tools.train_embedded.cases import GROW
from tools.train_embedded.examples import PERSON
from tools.train_embedded.garments import COLOURS, PATTERNS, Garment
from tools.train_embedded.masks import silhouette_mask
from tools.train_embedded.scenes import Scene, draw_scene, render

FOLDER = Path("entrypoints/playground/static/examples")
SCENES = {"person": PERSON} | {f"person-{i}": draw_scene(seeds.EXAMPLES + i) for i in (4, 12, 32, 11, 33)}
PROMPTS = 4  # per garment


def write_gallery(folder: Path) -> None:
    """Write a picture per scene, a black and white mask per garment (white = edit), and examples.json, their index."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [_write_scene(folder, name, scene) for name, scene in SCENES.items()]
    (folder / "examples.json").write_text(json.dumps({"examples": listed}, indent=1) + "\n")


def _write_scene(folder: Path, name: str, scene: Scene) -> dict[str, Any]:
    drawn, rng = render(scene), random.Random(name)
    Image.fromarray(drawn.image).save(folder / f"{name}.png", optimize=True)
    garments = []
    for slot, garment in scene.garments().items():
        mask = silhouette_mask(drawn.silhouettes[slot], GROW)
        file = f"{name}-{garment.kind}.png"
        Image.fromarray(mask.astype(np.uint8) * 255).convert("1").save(folder / file, optimize=True)
        garments.append({"kind": garment.kind, "mask": file, "prompts": _prompts(garment, rng)})
    worn = " and ".join(noun_phrase(garment) for garment in scene.garments().values())
    return {"image": f"{name}.png", "title": f"A person in {worn}", "garments": garments}


def _prompts(garment: Garment, rng: random.Random) -> list[str]:
    """Prompts for other colours and patterns of the garment, without repeating a colour or a pattern."""
    colours = rng.sample([colour for colour in COLOURS if colour != garment.colour], PROMPTS)
    patterns = rng.sample(PATTERNS, PROMPTS)
    looks = zip(colours, patterns, strict=True)
    return [noun_phrase(Garment(garment.kind, colour, pattern, 0)) for colour, pattern in looks]
