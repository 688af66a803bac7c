"""The pool of training examples: latents, masks and captions. On a CPU they are in memory-mapped files, kept between
runs. On a GPU they are in its memory, since gathering a batch from files takes as long as a step; a later run draws
them again.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

from tools.train_embedded.drawers import Drawers, spare_processes
from tools.train_embedded.layout import GRID, IMAGE_TOKENS, LATENTS, MASK, TEXT_TOKENS, pack, pack_mask
from tools.train_embedded.masks import MaskedEdit, Mixture, draw_edit
from tools.train_embedded.scenes import SIZE, Pixels, Render, Scene, draw_scene, empty_room, hands, render
from tools.train_embedded.tokenizing import Tokenizers
from tools.train_embedded.training import precision

CAPACITY = 200_000  # examples per rank, 73 kB each; the files are sparse until filled
EDITS_PER_SCENE = 3
Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a field of an example -> its shape and dtype."""

FIELDS: Fields = {
    "target": ((IMAGE_TOKENS, LATENTS), torch.float16),
    "masked": ((IMAGE_TOKENS, LATENTS), torch.float16),
    "mask": ((IMAGE_TOKENS, MASK // 8), torch.uint8),  # one bit per pixel
    "clip": ((TEXT_TOKENS,), torch.int16),
    "t5": ((TEXT_TOKENS,), torch.int16),
    "detail": ((IMAGE_TOKENS,), torch.uint8),
}


@dataclass(frozen=True)
class Batch:
    """Training examples. Each tensor's first axis is the batch."""

    target: Tensor  # [batch, 256, 64] latents of the picture, shifted and scaled
    masked: Tensor  # [batch, 256, 64] latents of the picture with its masked pixels zero
    mask: Tensor  # [batch, 256, 256] 0 or 1
    clip: Tensor  # [batch, 24] ids
    t5: Tensor  # [batch, 24] ids
    detail: Tensor  # [batch, 256] 1 where a token shows a part of a hand, or the figure's outline


def detail(scene: Scene, drawn: Render) -> NDArray[np.uint8]:
    """[256] 1 for the image tokens that show a part of a hand, or both the room and the figure; else 0."""
    room = (drawn.image == empty_room(scene)).all(-1)
    room_share, hand_share = (
        x.reshape(GRID, SIZE // GRID, GRID, SIZE // GRID).mean((1, 3)).flatten() for x in (room, hands(scene))
    )
    shows: NDArray[np.uint8] = ((hand_share > 0) | ((room_share > 0) & (room_share < 1))).astype(np.uint8)
    return shows


@dataclass(frozen=True)
class DrawnScene:
    """What a pool needs of one scene."""

    image: Pixels  # [256, 256, 3]
    detail: NDArray[np.uint8]  # [256], as in Batch
    edits: tuple[MaskedEdit, ...]


def draw_edits(seed: int, mixture: Mixture) -> DrawnScene:
    rng, scene = random.Random(seed), draw_scene(seed)
    drawn = render(scene)
    edits = tuple(draw_edit(rng, scene, drawn, mixture) for _ in range(EDITS_PER_SCENE))
    return DrawnScene(drawn.image, detail(scene, drawn), edits)


def open_fields(folder: Path, is_new: bool, wanted: Fields = FIELDS) -> dict[str, Tensor]:
    """A pool's files by field, [CAPACITY, ...] each; a new pool's are created. Raises FileNotFoundError if an older
    version of this module, which had fewer fields, wrote the folder.
    """
    paths = {name: folder / f"{name}.bin" for name in wanted}
    missing = [] if is_new else [path.name for path in paths.values() if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: delete this folder, and it is drawn again")
    fields = {}
    for name, (shape, dtype) in wanted.items():
        size = CAPACITY * math.prod(shape)
        fields[name] = torch.from_file(str(paths[name]), shared=True, size=size, dtype=dtype).view(CAPACITY, *shape)
    return fields


def fields_on(device: torch.device, wanted: Fields = FIELDS) -> dict[str, Tensor]:
    """A new pool's fields in a device's memory, [CAPACITY, ...] each."""
    return {name: torch.empty(CAPACITY, *shape, dtype=dtype, device=device) for name, (shape, dtype) in wanted.items()}


class Pool:
    """Examples of one rank, on the autoencoder's device, drawn and encoded on demand; the oldest are overwritten."""

    fields: ClassVar[Fields] = FIELDS

    def __init__(
        self, folder: Path, vae: AutoencoderKL, tokenizers: Tokenizers, first_seed: int, mixture: Mixture
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._vae, self._tokenizers = vae, tokenizers
        self._device: torch.device = vae.device
        on_gpu = self._device.type == "cuda"
        self._scenes_file = None if on_gpu else folder / "scenes.txt"
        self._scenes = 0
        if self._scenes_file is not None and self._scenes_file.exists():
            self._scenes = int(self._scenes_file.read_text())
        self._fields = (
            fields_on(self._device, self.fields) if on_gpu else open_fields(folder, not self._scenes, self.fields)
        )
        processes = spare_processes(on_gpu)
        self._drawers = Drawers(partial(draw_edits, mixture=mixture), first_seed + self._scenes, processes)

    @property
    def drawn(self) -> int:
        """Number of examples drawn so far, overwritten ones included."""
        return self._scenes * EDITS_PER_SCENE

    def grow(self) -> None:
        """Encode the next scenes; waits until they are drawn."""
        scenes = self._drawers.take()
        self._write(scenes)
        self._scenes += len(scenes)
        if self._scenes_file is not None:
            self._scenes_file.write_text(str(self._scenes))

    def grow_if_ready(self) -> None:
        """Encode scenes that were drawn meanwhile."""
        if self._drawers.ready:
            self.grow()

    def close(self) -> None:
        self._drawers.close()

    def _write(self, scenes: Sequence[DrawnScene]) -> None:
        number = sum(len(scene.edits) for scene in scenes)
        rows = (torch.arange(number, device=self._device) + self.drawn) % CAPACITY
        for name, values in self._values(scenes).items():
            self._fields[name][rows] = values.to(self._device, self.fields[name][1])

    def _values(self, scenes: Sequence[DrawnScene]) -> dict[str, Tensor]:
        """The fields of the scenes' edits, [edits, ...] each."""
        device = self._device
        edits = [edit for scene in scenes for edit in scene.edits]
        owners = torch.tensor([i for i, scene in enumerate(scenes) for _ in scene.edits], device=device)
        pixels = torch.from_numpy(np.stack([scene.image for scene in scenes])).to(device)
        pictures = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        masks = torch.from_numpy(np.stack([edit.mask for edit in edits])).to(device).float()
        targets, masked = self._encode(pictures, pictures[owners] * (1 - masks[:, None]))
        clip, t5 = self._tokenizers([edit.caption for edit in edits])
        detail = torch.from_numpy(np.stack([scene.detail for scene in scenes])).to(device)
        return {
            "target": targets[owners],
            "masked": masked,
            "mask": pack_bits(pack_mask(masks) > 0.5),
            "clip": clip,
            "t5": t5,
            "detail": detail[owners],
        }

    @torch.no_grad()
    def _encode(self, pictures: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Latents of the pictures (the mean), and of those that are sampled, as the pipeline does what it shows the
        denoiser."""
        both = torch.cat([pictures, sampled])
        if self._device.type == "cpu":  # more than twice as fast on a CPU with AMX
            both = both.contiguous(memory_format=torch.channels_last)
        with precision(self._device):
            posterior = self._vae.encode(both).latent_dist
        number = len(pictures)
        latents = torch.cat([posterior.mode()[:number].float(), posterior.sample()[number:].float()])
        tokens = pack((latents - self._vae.config.shift_factor) * self._vae.config.scaling_factor).half()
        return tokens[:number], tokens[number:]

    def rows(self, size: int) -> Tensor:
        """Indices of random examples, [size], on the pool's device."""
        return torch.randint(min(self.drawn, CAPACITY), (size,), device=self._device)

    def batch(self, size: int) -> Batch:
        """A random batch, on the pool's device."""
        return self.taken(self.rows(size))

    def taken(self, rows: Tensor) -> Batch:
        """The examples of some indices."""
        field = {name: self._fields[name][rows] for name in FIELDS}
        return Batch(
            target=field["target"].float(),
            masked=field["masked"].float(),
            mask=unpack_bits(field["mask"]).float(),
            clip=field["clip"].long(),
            t5=field["t5"].long(),
            detail=field["detail"].float(),
        )


def pack_bits(bits: Tensor) -> Tensor:
    """[..., 8 * bytes] bool to [..., bytes] uint8, the first bit of a byte being its highest."""
    weights = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    packed: Tensor = (bits.unflatten(-1, (-1, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: Tensor) -> Tensor:
    """The inverse of `pack_bits`, as uint8 of 0 and 1."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)
