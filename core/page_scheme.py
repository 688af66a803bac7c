"""How a model's activations are cached: the form of a page, the noise levels it is kept at, and all byte counts.

A page is the K (after norm and rotary) and V of all image tokens of a template, for one block at one keyframe. An entry
is a template's pages at one keyframe, block after block; each block's page is one contiguous run of bytes:

    entry   | block 0 | block 1 | ...                             each padded to 64 bytes
    block   | values [2 (K, V), heads, rows, head dim] | scales [2, heads, rows] float32, int8 pages only |
            | moments [numbers, image tokens], of UNets only, float16 and in float32 pages float32 |

Rows are the image tokens, and behind them the condition tokens, where there are any. Of a UNet values are a layer's
output, and moments what its group norm has seen of each token.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

PageDtype = Literal["int8", "bfloat16", "float32"]
"""int8: symmetric, one scale per token and head; bfloat16 and float32 as they are."""

SCHEME_VERSION = 3
"""Part of every key: raise it when the same template would get other pages."""

_ITEM_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
_SCALE_BYTES = 4
_MOMENT_BYTES: dict[PageDtype, int] = {"int8": 2, "bfloat16": 2, "float32": 4}
_ALIGNMENT = 64
_MEMORY_PAGE = 4096


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model's pages. num_blocks counts transformer blocks, of a UNet pages, in the order they run.
    rows_per_token: keys and values kept per image token: 2 where the denoiser sees the clean template too, as tokens of
    its own. num_moments: numbers kept beside a page per image token.
    """

    num_blocks: int
    num_heads: int
    head_dim: int
    dtype: PageDtype
    rows_per_token: int = 1
    num_moments: int = 0

    def num_rows(self, num_tokens: int) -> int:
        """Keys (or values) of a head in a block, of a picture of so many image tokens."""
        return self.rows_per_token * num_tokens

    def value_bytes(self, num_tokens: int) -> int:
        """Bytes of a block's values."""
        return 2 * self.num_heads * self.num_rows(num_tokens) * self.head_dim * _ITEM_BYTES[self.dtype]

    def scale_bytes(self, num_tokens: int) -> int:
        """Bytes of a block's scales; 0 where pages have none."""
        return 2 * self.num_heads * self.num_rows(num_tokens) * _SCALE_BYTES if self.dtype == "int8" else 0

    def moment_bytes(self, num_tokens: int) -> int:
        """Bytes of a block's moments."""
        return self.num_moments * num_tokens * _MOMENT_BYTES[self.dtype]

    def block_bytes(self, num_tokens: int) -> int:
        """Bytes from one block's page to the next."""
        size = self.value_bytes(num_tokens) + self.scale_bytes(num_tokens) + self.moment_bytes(num_tokens)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def entry_bytes(self, num_tokens: int) -> int:
        return self.num_blocks * self.block_bytes(num_tokens)


class PageScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How templates of one model are cached.

    keyframes: noise levels 1..0, falling, at least two; () keeps pages at every step's own noise level. latent_bytes:
    bytes per token of a template's clean latents. fingerprint: hash over all weights and the compute dtype. prompt and
    guidance_scale: the conditioning of priming. mask_margin (px): what an edit that names none gets. full_steps,
    full_steps_of, full_steps_from: so many leading steps of so many compute every token where the mask ratio (0..1) is
    at least so large, and none below; see `full_steps_at`.
    environment: hash of what changes bits without changing the model: device type, its name, threads, torch version.
    """

    layout: PageLayout
    keyframes: tuple[float, ...]
    latent_bytes: int
    fingerprint: str
    guidance_scale: float
    mask_margin: int
    full_steps: int
    full_steps_of: int = 1
    full_steps_from: float = 0.0
    prompt: str = ""
    environment: str = ""

    def full_steps_at(self, mask_ratio: float, num_steps: int) -> int:
        """Leading steps that compute every token, for an edit that names none: the same share of any number of steps,
        rounded up, since what they settle is settled by the noise level, not by their number.
        """
        if mask_ratio < self.full_steps_from:
            return 0
        return -(-self.full_steps * num_steps // self.full_steps_of)

    def template_key(self, content_id: str, cache_salt: str = "") -> str:
        """Hex digest of all that a template's pages depend on, but the noise level, and of whose they are.

        cache_salt: see `CacheConfig.salt`. Pages with different salts are equal and are never shared: a hit would tell
        one owner what another one has edited.
        """
        model = [self.fingerprint, self.environment, self.layout.dtype]
        parts = [SCHEME_VERSION, content_id, *model, self.prompt, self.guidance_scale]
        if cache_salt:
            parts.append(cache_salt)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def latent_entry_bytes(self, num_tokens: int) -> int:
        """Bytes of the entry with a template's clean latents."""
        return num_tokens * self.latent_bytes

    def template_bytes(self, num_tokens: int, num_keyframes: int) -> int:
        """Most bytes that a template's entries take, each filling whole pages of memory."""
        latents, pages = self.latent_entry_bytes(num_tokens), self.layout.entry_bytes(num_tokens)
        return _whole_pages(latents) + num_keyframes * _whole_pages(pages)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _MEMORY_PAGE) * _MEMORY_PAGE


def page_key(template_key: str, sigma: float) -> str:
    """The entry with a template's pages at noise level `sigma`."""
    return f"{template_key}-{sigma.hex()}"


def latents_key(template_key: str) -> str:
    """The entry with a template's clean latents."""
    return f"{template_key}-latents"


def template_of(key: str) -> str:
    """The template key that an entry's key starts with. A key without "-" is a template's own."""
    return key.partition("-")[0]
