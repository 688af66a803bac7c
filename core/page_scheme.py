"""PageScheme: how a model's activations are cached: the layout of pages, their noise levels, and all byte counts.

A page is the K (after norm and rotary) and V of all image tokens of a template, for one block at one keyframe (a noise
level). An entry is a template's pages at one keyframe, block after block; a page is one contiguous run of bytes:

    entry   | block 0 | block 1 | ...                             each padded to 64 bytes
    block   | values [2 (K, V), heads, rows, head dim] | scales [2, heads, rows] float32, int8 pages only |
            | moments [numbers, image tokens], of UNets only, float16 and in float32 pages float32 |

Rows are the image tokens, followed by the condition tokens, if any. In a UNet, values are a layer's output, and moments
are each token's contribution to the statistics of its group norm.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from core.patches import PatchSet, patch_digest

PageDtype = Literal["int8", "bfloat16", "float32"]
"""int8: symmetric, with one scale per token and head; bfloat16 and float32: plain values."""

SCHEME_VERSION = 5
"""Part of every key: to be raised when the same template would get different pages."""

_ITEM_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
_SCALE_BYTES = 4
_MOMENT_BYTES: dict[PageDtype, int] = {"int8": 2, "bfloat16": 2, "float32": 4}
_ALIGNMENT = 64
_MEMORY_PAGE = 4096


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model's pages."""

    num_blocks: int  # transformer blocks, in a UNet pages, in the order in which they run
    num_heads: int
    head_dim: int
    dtype: PageDtype
    rows_per_token: int = 1  # keys and values per image token; 2: the clean template has tokens of its own
    condition_rows: int = 0  # of a picture with references, the template's own included: see `with_conditions`
    num_moments: int = 0  # numbers stored beside a page per image token

    def with_conditions(self, number: int) -> PageLayout:
        """That of a picture with this many condition tokens, whatever its size: one with references."""
        return msgspec.structs.replace(self, rows_per_token=1, condition_rows=number)

    def num_rows(self, num_tokens: int) -> int:
        """Keys (or values) of a head in a block, for a picture with this many image tokens."""
        return self.rows_per_token * num_tokens + self.condition_rows

    def value_bytes(self, num_tokens: int) -> int:
        """Bytes of a block's values."""
        return 2 * self.num_heads * self.num_rows(num_tokens) * self.head_dim * _ITEM_BYTES[self.dtype]

    def scale_bytes(self, num_tokens: int) -> int:
        """Bytes of a block's scales; 0 if pages have none."""
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


OWN_PAGES_DTYPE: PageDtype = "int8"
"""Of the pages that an edit's full steps make for its other steps. On 24 edits under boxes the mean SSIM to exact ones
was the same with int8 and with float32.
"""


class PageScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How templates of one model are cached. Made by the worker from the model, its calibration and the flags."""

    # Pages.
    layout: PageLayout
    keyframes: tuple[float, ...]  # noise levels 1..0, falling, at least two; (): pages at every step's noise level
    latent_bytes: int  # bytes per token of a template's clean latents
    # Conditioning of priming.
    guidance_scale: float
    prompt: str = ""
    # Identity: parts of every key.
    fingerprint: str  # hash of all weights and the compute dtype
    family: str = ""  # of models: two may have equal weights, and prime differently
    environment: str = ""  # hash of what changes bits but not the model: device type and name, threads, torch version
    # Defaults of edits.
    mask_margin: int  # px
    full_steps: int  # leading steps, of full_steps_of, that compute every token; see `full_steps_at`
    full_steps_of: int = 1
    full_steps_from: float = 0.0  # mask ratio (0..1) below which no step computes every token

    def full_steps_at(self, mask_ratio: float, num_steps: int) -> int:
        """Default number of leading steps that compute every token: the same share of any number of steps, rounded up,
        because what these steps determine depends on the noise level, not on their number.
        """
        if mask_ratio < self.full_steps_from:
            return 0
        return -(-self.full_steps * num_steps // self.full_steps_of)

    def template_key(self, content_id: str, cache_salt: str = "", patches: PatchSet = ()) -> str:
        """Hex digest of all that a template's pages depend on except the noise level, and of their owner. With patches,
        that of the same without, "+" and their digest: see `unpatched`.

        cache_salt: see `CacheConfig.salt`. Pages that differ only in the salt are equal but never shared: a hit would
        reveal to one owner what another one has edited.
        """
        model = [self.fingerprint, self.family, self.environment, self.layout.dtype]
        parts = [SCHEME_VERSION, content_id, *model, self.prompt, self.guidance_scale]
        if cache_salt:
            parts.append(cache_salt)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        return f"{key}+{patch_digest(patches)}" if patches else key

    def with_conditions(self, number: int) -> PageScheme:
        """See `PageLayout.with_conditions`."""
        return msgspec.structs.replace(self, layout=self.layout.with_conditions(number))

    def own_page_bytes(self, num_tokens: int) -> int:
        """Bytes of one row's own pages."""
        return msgspec.structs.replace(self.layout, dtype=OWN_PAGES_DTYPE).entry_bytes(num_tokens)

    def latent_entry_bytes(self, num_tokens: int) -> int:
        """Bytes of the entry with a template's clean latents."""
        return num_tokens * self.latent_bytes

    def template_bytes(self, num_tokens: int, num_keyframes: int, num_reference_tokens: int = 0) -> int:
        """Upper bound on the bytes of a template's entries, each rounded up to whole pages of memory."""
        latents = self.latent_entry_bytes(num_tokens + num_reference_tokens)
        pages = self.layout.entry_bytes(num_tokens)
        return _whole_pages(latents) + num_keyframes * _whole_pages(pages)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _MEMORY_PAGE) * _MEMORY_PAGE


def page_key(template_key: str, sigma: float) -> str:
    """Key of the entry with a template's pages at noise level `sigma`."""
    return f"{template_key}-{sigma.hex()}"


def latents_key(template_key: str) -> str:
    """Key of the entry with a template's clean latents."""
    return f"{template_key}-latents"


def template_of(key: str) -> str:
    """The template key that an entry's key starts with. A key without "-" is itself a template key."""
    return key.partition("-")[0]


def unpatched(key: str) -> str:
    """The key of the same template without patches, for the key of a template or of an entry: when a picture is to be
    forgotten, nobody knows with which patches it was edited."""
    return template_of(key).partition("+")[0]
