"""How masks of words, points and boxes are joined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from core.selection import Point, Selection
from model_executor.segmenters.segmenter import Box, Found, Seen, Segmenter

WIDTH = 10
SEEN = Seen((torch.zeros(1),), 1, WIDTH)


def row(**shares: float) -> Tensor:
    """A mask of one row. shares: of pixels, such as p3=0.5."""
    return torch.tensor([[shares.get(f"p{i}", 0.0) for i in range(WIDTH)]])


class Scripted(Segmenter):
    """Finds pixels 0 to 3 for words, pixels 4 to 9 for a box, and one pixel for each point; records its prompts."""

    takes = frozenset({"words", "points", "box"})

    def __init__(self) -> None:
        super().__init__({})
        self.prompts: list[object] = []

    def look(self, pictures: Sequence[Tensor]) -> list[Seen]:
        return [SEEN for _ in pictures]

    def _find_words(self, seen: Seen, words: str) -> Found:
        self.prompts.append(words)
        return Found(row(p0=0.9, p1=0.9, p2=0.9, p3=0.2), 0.7)

    def _find_points(self, seen: Seen, points: tuple[Point, ...]) -> Found:
        self.prompts.append(points)
        return Found(row(**{f"p{int(point.x * WIDTH)}": 0.8 for point in points if point.adds}), 0.8)

    def _find_box(self, seen: Seen, box: Box) -> Found:
        self.prompts.append(box)
        return Found(row(**{f"p{i}": 0.6 for i in range(4, 10)}), 0.5)


def at(pixel: int, adds: bool = True) -> Point:
    return Point((pixel + 0.5) / WIDTH, 0.5, adds)


def shares(**selection: object) -> list[float]:
    found = Scripted().find(SEEN, Selection(**selection))  # type: ignore[arg-type]
    return [round(share, 4) for share in found.shares[0].tolist()]


def test_words_alone() -> None:
    found = Scripted().find(SEEN, Selection(words="hat"))
    assert torch.equal(found.shares, row(p0=0.9, p1=0.9, p2=0.9, p3=0.2))
    assert found.score == 0.7


def test_points_alone_are_one_prompt() -> None:
    scripted, points = Scripted(), (at(2), at(5, False), at(7))
    found = scripted.find(SEEN, Selection(points=points))
    assert scripted.prompts == [points]
    assert torch.equal(found.shares, row(p2=0.8, p7=0.8))


def test_words_and_points_are_joined_and_left_out() -> None:
    scripted = Scripted()
    found = scripted.find(SEEN, Selection(words="hat", points=(at(2), at(1, False), at(3))))
    assert scripted.prompts == ["hat", (at(2), at(3)), (at(1),)]
    assert torch.allclose(found.shares, row(p0=0.9, p1=0.2, p2=0.9, p3=0.8))
    assert found.score == 0.8


def test_a_box_alone_is_what_fills_it() -> None:
    """Also beyond its edges, as the model sees it."""
    assert shares(box=(0.5, 0.0, 0.7, 1.0)) == [0.0] * 4 + [0.6] * 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"words": "hat"}, [0.0, 0.9, 0.9, 0.0]),
        ({"points": (at(0), at(2))}, [0.0, 0.0, 0.8, 0.0]),
        ({"words": "hat", "points": (at(1, False),)}, [0.0, 0.2, 0.9, 0.0]),
    ],
)
def test_nothing_outside_of_a_box_beside_words_or_points(given: dict[str, object], expected: list[float]) -> None:
    assert shares(**given, box=(0.1, 0.0, 0.3, 1.0)) == expected + [0.0] * 6


def test_points_that_do_not_add_are_left_out_of_a_box() -> None:
    assert shares(points=(at(5, False),), box=(0.4, 0.0, 1.0, 1.0)) == [0.0] * 4 + [0.6, 0.2] + [0.6] * 4


def test_points_that_do_not_add_alone_mean_nothing() -> None:
    found = Scripted().find(SEEN, Selection(points=(at(5, False),)))
    assert (found.shares.max().item(), found.score) == (0.0, 0.0)


def test_a_box_above_and_below() -> None:
    """Rows are told apart by their centres, too."""
    seen = Seen((torch.zeros(1),), 4, 1)

    class Everything(Scripted):
        def _find_words(self, seen: Seen, words: str) -> Found:
            return Found(torch.ones(4, 1), 1.0)

    found = Everything().find(seen, Selection(words="hat", box=(0.0, 0.25, 1.0, 0.6)))
    assert found.shares[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_what_is_not_taken() -> None:
    scripted = Scripted()
    scripted.takes = frozenset({"words"})
    with pytest.raises(ValueError, match=r"Scripted takes no box and no points$"):
        scripted.find(SEEN, Selection(words="hat", points=(at(1),), box=(0, 0, 1, 1)))


def test_parts_that_are_not_there() -> None:
    with pytest.raises(KeyError):
        Scripted().put("segmenter", torch.nn.Identity())
    with pytest.raises(KeyError):
        Scripted().drop("segmenter")
