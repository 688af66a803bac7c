"""Changes training pictures as uploads differ from renders: cropped, mirrored, lit otherwise, and encoded again."""

import io
import random

import numpy as np
from PIL import Image

from tools.train_embedded.scenes import SIZE, Pixels


def augment(rng: random.Random, image: Pixels, parts: Pixels) -> tuple[Pixels, Pixels]:
    """A changed picture [256, 256, 3] and the map of parts [256, 256] that fits it."""
    if rng.random() < 0.5:
        image, parts = image[:, ::-1], parts[:, ::-1]
    if rng.random() < 0.35:
        image, parts = _cropped(rng, image, parts)
    if rng.random() < 0.6:
        image = _lit(rng, image)
    if rng.random() < 0.3:
        image = _encoded(rng, image)
    return image, parts


def _cropped(rng: random.Random, image: Pixels, parts: Pixels) -> tuple[Pixels, Pixels]:
    """A crop of any aspect ratio, resized to the whole."""
    width, height = rng.uniform(0.65, 1.0) * SIZE, rng.uniform(0.65, 1.0) * SIZE
    x, y = rng.uniform(0, SIZE - width), rng.uniform(0, SIZE - height)
    box = (x, y, x + width, y + height)
    size = (SIZE, SIZE)
    return (
        np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC, box)),
        np.asarray(Image.fromarray(parts).resize(size, Image.Resampling.NEAREST, box)),
    )


def _lit(rng: random.Random, image: Pixels) -> Pixels:
    """Another brightness, contrast, gamma and tint, and a little noise."""
    gains = np.array([rng.uniform(0.93, 1.07) for _ in range(3)], np.float32) * rng.uniform(0.8, 1.2)
    lit = (image / np.float32(255)) ** np.float32(rng.uniform(0.8, 1.25)) * gains + rng.uniform(-0.05, 0.05)
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(image.shape, np.float32)
        lit += noise * np.float32(rng.uniform(0, 0.03))
    return (np.clip(lit, 0, 1) * 255).astype(np.uint8)


def _encoded(rng: random.Random, image: Pixels) -> Pixels:
    """Through JPEG, and in half of the cases through a smaller size before it."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    if rng.random() < 0.5:
        side = round(rng.uniform(0.6, 1.0) * SIZE)
        picture = picture.resize((side, side), Image.Resampling.BILINEAR).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=rng.randint(50, 95))
    return np.asarray(Image.open(file))
