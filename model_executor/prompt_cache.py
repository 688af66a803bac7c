"""Prompts already embedded: the least recently used go first when the bytes run out."""

from __future__ import annotations

from collections import OrderedDict

from model_executor.models.base import EncodedText, Family

DEFAULT_BYTES = 64 * 1024 * 1024


class PromptCache:
    """What `family.encode_text` answered, as long as it fits. Not to be kept when the text encoders' weights change."""

    def __init__(self, family: Family, max_bytes: int = DEFAULT_BYTES) -> None:
        self._family = family
        self._max_bytes = max_bytes
        self._texts: OrderedDict[tuple[str, int], EncodedText] = OrderedDict()  # the last was used last
        self.nbytes = 0

    def encode(self, prompt: str, max_sequence_length: int) -> EncodedText:
        """As Family.encode_text, with the same bits. The tensors are shared with later calls: not to be written to."""
        key = (prompt, max_sequence_length)
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        text = self._family.encode_text(prompt, max_sequence_length)
        if _nbytes(text) <= self._max_bytes:
            self._keep(key, text)
        return text

    def _keep(self, key: tuple[str, int], text: EncodedText) -> None:
        self.nbytes += _nbytes(text)
        self._texts[key] = text
        while self.nbytes > self._max_bytes:
            _, oldest = self._texts.popitem(last=False)
            self.nbytes -= _nbytes(oldest)


def _nbytes(text: EncodedText) -> int:
    """Bytes kept with a text: those of the storages its tensors are views of."""
    return text.prompt_embeds.untyped_storage().nbytes() + text.pooled_prompt_embeds.untyped_storage().nbytes()
