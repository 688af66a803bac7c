"""Chat: a prompt in the chat template of a language model's tokenizer, as the one message before the answer."""

from __future__ import annotations

from typing import Any

import torch

from model_executor.models.text import Tokens

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the prompt while the template is read."""


class Chat:
    """Turns prompts into tokens as the tokenizer's `apply_chat_template` and the tokenizer do, with one difference:
    text that looks like a special token is encoded as plain text, so that a prompt cannot end its own message."""

    def __init__(self, tokenizer: Any, *, thinks: bool) -> None:
        """thinks: the template's `enable_thinking`. Raises ValueError for a template that fails, and for one that does
        not give a message back as it is."""
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinks}
        try:
            chat: str = tokenizer.apply_chat_template([{"role": "user", "content": PLACE}], **options)
        except Exception as error:  # a template is a program
            raise ValueError(f"the tokenizer's chat template cannot be used: {error}") from error
        before, *after = chat.split(PLACE)
        if len(after) != 1:
            raise ValueError("the tokenizer's chat template cannot be used: it gives no message back as it is")
        specials = [name for name in tokenizer.get_added_vocab() if name in before]
        start = max((before.rindex(name) + len(name) for name in specials), default=0)
        # What is between the last special token and the prompt is read together with it: they may share a token.
        self._tokenizer, self._opening = tokenizer, before[start:]
        self._before, self._after = (self._ids(text) for text in (before[:start], after[0]))
        self._frame = len(self._before) + len(self._ids(self._opening))

    def tokens(self, prompt: str, length: int) -> Tokens:
        """The chat's tokens, cut to `length`; `used` counts those of the prompt."""
        words = self._ids(self._opening + prompt, split_special_tokens=True)
        ids = [*self._before, *words, *self._after]
        number, room = len(self._before) + len(words) - self._frame, max(0, length - self._frame)
        return Tokens(torch.tensor([ids[:length]]), min(number, room), len(ids) > length)

    def _ids(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._tokenizer(text, **options).input_ids
        return ids
