"""Scenes that training takes its batches from: drawn on demand, shown several times, the oldest replaced."""

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tools.train_embedded.scenes import Pixels, Scene, draw_scene, render
from tools.train_segmenter.augment import augment
from tools.train_segmenter.prompts import Asked, draw_prompt
from tools.train_segmenter.things import shown

CAPACITY = 1536  # scenes, 256 KiB each


@dataclass(frozen=True)
class Batch:
    """Pictures with several prompts each."""

    images: Tensor  # [pictures, 256, 256, 3], uint8
    shown: Tensor  # [pictures, 256, 256], uint8: what each pixel shows, as an index into SHOWN
    texts: list[str]  # [pictures * prompts], those of one picture in a row
    masks: Tensor  # [pictures * prompts, 256, 256], bool


@dataclass(frozen=True)
class DrawnScene:
    scene: Scene
    image: Pixels  # [256, 256, 3]
    parts: Pixels  # [256, 256], numbers of Part


def draw(seed: int) -> DrawnScene:
    scene = draw_scene(seed)
    drawn = render(scene)
    return DrawnScene(scene, drawn.image, drawn.parts())


class Pool:
    """Scenes in memory, of the seeds from `first_seed` on."""

    def __init__(self, first_seed: int) -> None:
        self._first_seed, self._scenes = first_seed, deque[DrawnScene](maxlen=CAPACITY)
        self.drawn = 0  # scenes so far, replaced ones included

    def skip_to(self, drawn: int) -> None:
        """Go on as if this many scenes had been drawn, all of them replaced."""
        self.drawn = max(self.drawn, drawn)

    def __len__(self) -> int:
        return len(self._scenes)

    def grow(self) -> None:
        """Draw the next scene."""
        self._scenes.append(draw(self._first_seed + self.drawn))
        self.drawn += 1

    def batch(self, rng: random.Random, pictures: int, prompts: int) -> Batch:
        """Random scenes, each changed in a way of its own."""
        images, shows, texts, masks = [], [], list[str](), []
        for _ in range(pictures):
            drawn = rng.choice(self._scenes)
            image, parts = augment(rng, drawn.image, drawn.parts)
            asked = Asked.of(parts, drawn.scene)
            drawn_prompts = [draw_prompt(rng, asked) for _ in range(prompts)]
            images.append(image)
            shows.append(shown(parts, drawn.scene))
            texts += [prompt.text for prompt in drawn_prompts]
            masks += [prompt.mask for prompt in drawn_prompts]
        images_, shown_, masks_ = (torch.from_numpy(np.stack(each)) for each in (images, shows, masks))
        return Batch(images_, shown_, texts, masks_)
