"""Stage `examples`: the pictures and masks in `examples/`, drawn from fixed seeds."""

from pathlib import Path

import numpy as np
from PIL import Image

from tools.train_embedded import seeds
from tools.train_embedded.cases import GROW
from tools.train_embedded.garments import Garment
from tools.train_embedded.masks import Mask, silhouette_mask
from tools.train_embedded.scenes import Pixels, Scene, render

PERSON = Scene(
    seed=seeds.EXAMPLES + 9,
    top=Garment("shirt", "green", "plain", 11),
    bottom=Garment("trousers", "grey", "plain", 12),
    hat=None,
)


def rgba(image: Pixels, mask: Mask) -> Image.Image:
    """The image with alpha 0 where it should be edited, the form of masks in OpenAI's images API."""
    alpha = np.where(mask, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([image, alpha]), "RGBA")


def write_examples(folder: Path) -> None:
    """person.png, and its shirt's mask as alpha 0 (person_mask.png) and as white (person_mask_image.png)."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = render(PERSON)
    mask = silhouette_mask(drawn.silhouettes["top"], GROW)
    Image.fromarray(drawn.image).save(folder / "person.png", optimize=True)
    rgba(drawn.image, mask).save(folder / "person_mask.png", optimize=True)
    Image.fromarray(mask.astype(np.uint8) * 255).save(folder / "person_mask_image.png", optimize=True)
