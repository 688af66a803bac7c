"""The pool of training examples: latents, masks and captions in memory-mapped files, kept between runs."""

import random
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

from tools.train_embedded.layout import GRID, IMAGE_TOKENS, LATENTS, MASK, TEXT_TOKENS, pack, pack_mask
from tools.train_embedded.masks import MaskedEdit, Mixture, draw_edit
from tools.train_embedded.scenes import SIZE, Render, Scene, draw_scene, empty_room, hands, render
from tools.train_embedded.tokenizing import Tokenizers
from tools.train_embedded.training import precision

CAPACITY = 40_000  # examples per rank, 73 kB each; the files are sparse until filled
EDITS_PER_SCENE = 3
SCENES_PER_CALL = 2
FIELDS: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
    "target": ((IMAGE_TOKENS, LATENTS), np.float16),
    "masked": ((IMAGE_TOKENS, LATENTS), np.float16),
    "mask": ((IMAGE_TOKENS, MASK // 8), np.uint8),  # one bit per pixel
    "clip": ((TEXT_TOKENS,), np.int16),
    "t5": ((TEXT_TOKENS,), np.int16),
    "detail": ((IMAGE_TOKENS,), np.uint8),
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

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(Batch)})


def detail(scene: Scene, drawn: Render) -> NDArray[np.uint8]:
    """[256] 1 for the image tokens that show a part of a hand, or both the room and the figure; else 0."""
    room = (drawn.image == empty_room(scene)).all(-1)
    room_share, hand_share = (
        x.reshape(GRID, SIZE // GRID, GRID, SIZE // GRID).mean((1, 3)).flatten() for x in (room, hands(scene))
    )
    return ((hand_share > 0) | ((room_share > 0) & (room_share < 1))).astype(np.uint8)


class Pool:
    """Examples of one rank, drawn and encoded on demand; the oldest are overwritten once it is full."""

    def __init__(
        self, folder: Path, vae: AutoencoderKL, tokenizers: Tokenizers, first_seed: int, mixture: Mixture
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._vae, self._tokenizers, self._first_seed, self._mixture = vae, tokenizers, first_seed, mixture
        self._scenes_file = folder / "scenes.txt"
        self._scenes = int(self._scenes_file.read_text()) if self._scenes_file.exists() else 0
        mode = "r+" if self._scenes else "w+"
        self._fields = {
            name: np.memmap(folder / f"{name}.bin", dtype, mode, shape=(CAPACITY, *shape))  # type: ignore[call-overload]
            for name, (shape, dtype) in FIELDS.items()
        }

    @property
    def drawn(self) -> int:
        """Number of examples drawn so far, overwritten ones included."""
        return self._scenes * EDITS_PER_SCENE

    def grow(self) -> None:
        """Draw, mask and encode SCENES_PER_CALL scenes."""
        renders, edits, details = [], [], []
        for i in range(SCENES_PER_CALL):
            seed = self._first_seed + self._scenes + i
            rng, scene = random.Random(seed), draw_scene(seed)
            drawn = render(scene)
            renders.append(drawn)
            details.append(detail(scene, drawn))
            edits += [(i, draw_edit(rng, scene, drawn, self._mixture)) for _ in range(EDITS_PER_SCENE)]
        self._write(renders, details, edits)
        self._scenes += SCENES_PER_CALL
        self._scenes_file.write_text(str(self._scenes))

    def _write(
        self, renders: list[Render], details: list[NDArray[np.uint8]], edits: list[tuple[int, MaskedEdit]]
    ) -> None:
        pictures = torch.stack([torch.from_numpy(r.image) for r in renders]).permute(0, 3, 1, 2).float() / 127.5 - 1
        masks = torch.stack([torch.from_numpy(edit.mask) for _, edit in edits]).float()
        owners = [owner for owner, _ in edits]
        targets, masked = self._encode(pictures, pictures[owners] * (1 - masks[:, None]))
        clip, t5 = self._tokenizers([edit.caption for _, edit in edits])
        rows = [(self.drawn + k) % CAPACITY for k in range(len(edits))]
        self._fields["target"][rows] = targets[owners].numpy()
        self._fields["masked"][rows] = masked.numpy()
        self._fields["mask"][rows] = np.packbits(pack_mask(masks).numpy() > 0.5, axis=-1)
        self._fields["clip"][rows] = clip.numpy()
        self._fields["t5"][rows] = t5.numpy()
        self._fields["detail"][rows] = np.stack(details)[owners]

    @torch.no_grad()
    def _encode(self, pictures: Tensor, holed: Tensor) -> tuple[Tensor, Tensor]:
        """Latents of the pictures (the mean) and of the masked pictures (a sample, as in the pipeline)."""
        with precision(self._vae.device):
            posterior = self._vae.encode(torch.cat([pictures, holed]).to(self._vae.device)).latent_dist
        number = len(pictures)
        latents = torch.cat([posterior.mode()[:number].float(), posterior.sample()[number:].float()]).cpu()
        tokens = pack((latents - self._vae.config.shift_factor) * self._vae.config.scaling_factor).half()
        return tokens[:number], tokens[number:]

    def batch(self, size: int) -> Batch:
        rows = np.random.default_rng(int(torch.randint(1 << 40, ()))).integers(0, min(self.drawn, CAPACITY), size)
        field = {name: torch.from_numpy(values[rows]) for name, values in self._fields.items() if name != "mask"}
        bits = np.unpackbits(self._fields["mask"][rows], axis=-1)
        return Batch(
            target=field["target"].float(),
            masked=field["masked"].float(),
            mask=torch.from_numpy(bits).float(),
            clip=field["clip"].long(),
            t5=field["t5"].long(),
            detail=field["detail"].float(),
        )
