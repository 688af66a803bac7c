"""What ComfyUI's way to write prompts says."""

from __future__ import annotations

import time

import pytest

from entrypoints.workflows.comfy.weighted_text import plain_text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a red hat", "a red hat"),
        ("a hat \\(red\\)", "a hat (red)"),
        ("a (red:1) hat", "a red hat"),
        ("a ((red:1.0) hat:1.00)", "a red hat"),
        ("((a:1):1)(b:1) c", "ab c"),
        ("a \\\\(hat\\\\)", "a \\(hat\\)"),
        ("a () hat(())", "a  hat"),
        ("smile :) and go on", "smile :) and go on"),
        ("an open (parenthesis", "an open (parenthesis"),
        ("C:\\folder\\", "C:\\folder\\"),
        ("the embedding: a word", None),
        ("a (red:1.2) hat", None),
        ("a (red) hat", None),
        ("((red:1))", None),
        ("(a (b: :1)1)", None),
        ("(:1)", None),
        ("( )", None),
        ("a (:nan) hat", None),
        ("a embedding:style hat", None),
        ("embedding:style", None),
        ("a (Embedding:style:1.0) hat", None),
        ("(red:1)embedding:style", None),
        ("a \\(embedding:style\\)", "a (embedding:style)"),
        ("(" * 10_000 + "hat" + ")" * 10_000, None),
        ("(" * 10_000 + ")" * 10_000, ""),
    ],
)
def test_words_have_no_weights(text: str, words: str | None) -> None:
    if words is not None:
        assert plain_text(text) == words
        return
    with pytest.raises(ValueError, match=r"weight|embedding"):
        plain_text(text)


def test_a_text_is_read_in_time_that_its_length_says() -> None:
    text = "(" * 4000 + "a" * 15_000 + ":1)" * 4000
    began = time.perf_counter()
    assert plain_text(text) == "a" * 15_000
    assert time.perf_counter() - began < 0.2  # 2.8 s if every parenthesis reads what is in it
