"""The pool of training examples: those of the embedded model, each with the edges of its scene as a control picture."""

import random
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tools.train_edges.edges import Lines, control_picture
from tools.train_embedded.layout import IMAGE_TOKENS, LATENTS
from tools.train_embedded.pool import FIELDS, Batch, DrawnScene, Fields, Pool

THICK_SHARE, THICK = 0.25, 3  # of control pictures, whose lines are THICK pixels wide, as drawn by hand; others' are 1
LOWS = (40.0, 140.0)  # range of Canny's low threshold; the high one is twice that


class Steered(NamedTuple):
    """Training examples with their control pictures."""

    batch: Batch
    control: Tensor  # [batch, 256, 64] latents of the control picture, shifted and scaled


class EdgesPool(Pool):
    """Edits of a scene share its control picture."""

    fields: ClassVar[Fields] = FIELDS | {"control": ((IMAGE_TOKENS, LATENTS), torch.float16)}

    def steered(self, size: int) -> Steered:
        """A random batch."""
        rows = self.rows(size)
        return Steered(self.taken(rows), self._fields["control"][rows].float())

    def _values(self, scenes: Sequence[DrawnScene]) -> dict[str, Tensor]:
        drawn = np.stack([control_picture(scene.image, _lines(scene)) for scene in scenes])
        pictures = torch.from_numpy(drawn).to(self._device).permute(0, 3, 1, 2).float() / 127.5 - 1
        _, latents = self._encode(pictures[:0], pictures)
        owners = torch.tensor([i for i, scene in enumerate(scenes) for _ in scene.edits], device=self._device)
        return super()._values(scenes) | {"control": latents[owners]}


def _lines(scene: DrawnScene) -> Lines:
    """Drawn at random, from what the scene shows."""
    rng = random.Random(scene.image.tobytes())
    low = rng.uniform(*LOWS)
    return Lines(low, 2 * low, THICK if rng.random() < THICK_SHARE else 1)
