"""PromptCache: keeps embedded prompts within a byte budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from core.patches import PatchSet
from model_executor.models.base import EncodedText, Family
from model_executor.worker.stores.byte_cache import ByteCache

DEFAULT_BYTES = 64 * 1024 * 1024

Key = tuple[str, int, str, str, PatchSet]
"""(prompt, max_sequence_length, content id of the pictures if the embedding depends on it, cache salt, patches on which
the embedding depends)."""


class PromptCache:
    """A cache over `family.encode_text`. Becomes invalid when the text encoders' weights change."""

    def __init__(self, family: Family, max_bytes: int = DEFAULT_BYTES) -> None:
        self._family = family
        self._texts: ByteCache[Key, EncodedText] = ByteCache(max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all texts."""
        return self._texts.nbytes

    def encode(
        self,
        prompt: str,
        max_sequence_length: int,
        content_id: str = "",
        pictures: Sequence[Tensor] = (),
        cache_salt: str = "",
        patches: PatchSet = (),
    ) -> EncodedText:
        """As `Family.encode_text`, bit-identical. content_id: of the pictures. The tensors are shared with later calls
        of the same `cache_salt` and must not be modified."""
        picture = content_id if self._family.text_sees_template else ""
        key = (prompt, max_sequence_length, picture, cache_salt, self._family.patches_of_text(patches))
        if (text := self._texts.get(key)) is None:
            text = self._family.encode_text(prompt, max_sequence_length, pictures, patches)
            self._texts.put(key, text, _nbytes(prompt, text))
        return text


def _nbytes(prompt: str, text: EncodedText) -> int:
    """Bytes that a cached text keeps in memory: its prompt's, and those of the storages behind its tensors."""
    tensors = (text.prompt_embeds, text.pooled_prompt_embeds)
    return sys.getsizeof(prompt) + sum(tensor.untyped_storage().nbytes() for tensor in tensors)
