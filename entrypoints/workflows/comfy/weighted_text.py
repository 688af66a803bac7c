"""WeightedText: what ComfyUI's way to write prompts, (red:1.2) hat, says."""

from __future__ import annotations

import re

_EMBEDDING = re.compile(r"(?:^|\s|(?<!\\)[()])embedding:", re.IGNORECASE)
"""A word that names a file: at the beginning, after a space, or after a parenthesis that is not escaped."""

_SIGNS = re.compile(r"\\[()]|.", re.DOTALL)
"""An escaped parenthesis, whatever is before it, or another character."""


def plain_text(text: str) -> str:
    """The words of a prompt as a text encoder gets them: parentheses give the words in them another weight, unless they
    are escaped, \\( and \\), or end with ``:1)``. Raises ValueError that says why it cannot be read here: text encoders
    have no weights of words, nor words that are files.
    """
    if _EMBEDDING.search(text):
        raise ValueError("a word names an embedding's file, and none is read here")
    found, opened, closed = list[str](), list[int](), 0
    for each in _SIGNS.findall(text):
        if len(each) > 1:
            found.append(each[1])
        elif each == ")" and opened:
            _close(found, opened.pop(), closed)
            closed = len(found)
        else:
            if each == "(":
                opened.append(len(found))
            found.append(each)
    return "".join(found)


def _close(found: list[str], start: int, closed: int) -> None:
    """Take the parenthesis of a group away, and its weight. start: of the parenthesis. closed: end of the last group
    before, which may be in this one: the weight is behind it, and what is before it is not read again. Raises
    ValueError for a weight that is not 1, or that no words are before."""
    if start + 1 == len(found):
        del found[start:]
        return
    _, colon, weight = "".join(found[max(start + 1, closed) :]).rpartition(":")
    if not colon or not _is_one(weight) or len(found) - len(weight) - 1 == start + 1:
        group = f"{''.join(found[start:]):.40})"
        raise ValueError(f"{group!r} gives words a weight, and they have none here; write \\( for a parenthesis")
    del found[len(found) - len(weight) - 1 :]
    found[start] = ""


def _is_one(weight: str) -> bool:
    try:
        return float(weight) == 1.0
    except ValueError:
        return False
