"""Lines with code, as they are compared with a paper's."""

from __future__ import annotations

from benchmarks.evidence.effective_lines import PARTS, effective_lines
from benchmarks.load.server import ROOT

TEXT = '''"""A module."""

import os  # why


class A:
    """A class
    of two lines."""

    @property
    def f(self):
        # nothing
        return """text

        """

    def g(self): return (
        1,
    )

    async def h(self):
        await self.g()
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert effective_lines(TEXT) == 12
    assert effective_lines(TEXT, "A") == 11
    assert effective_lines(TEXT, "A.f") == 5
    assert effective_lines(TEXT, "A.g") == 3
    assert effective_lines(TEXT, "A.h") == 2


def test_all_parts_are_there() -> None:
    for parts in PARTS.values():
        for part in parts:
            file, _, name = part.partition(":")
            assert effective_lines((ROOT / file).read_text(), name) > 0
