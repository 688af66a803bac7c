"""What ComfyUI's way to write prompts says."""

from __future__ import annotations

import pytest

from entrypoints.workflows.comfy.weighted_text import plain_text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a red hat", "a red hat"),
        ("a hat \\(red\\)", "a hat (red)"),
        ("a (red:1) hat", "a red hat"),
        ("a ((red:1.0) hat:1.00)", "a red hat"),
        ("smile :) and go on", "smile :) and go on"),
        ("an open (parenthesis", "an open (parenthesis"),
        ("C:\\folder\\", "C:\\folder\\"),
        ("the embedding: a word", None),
        ("a (red:1.2) hat", None),
        ("a (red) hat", None),
        ("((red:1))", None),
        ("a (:nan) hat", None),
        ("a embedding:style hat", None),
        ("(" * 10_000 + ")" * 10_000, None),
    ],
)
def test_words_have_no_weights(text: str, words: str | None) -> None:
    if words is not None:
        assert plain_text(text) == words
        return
    with pytest.raises(ValueError, match=r"weight|embedding"):
        plain_text(text)
