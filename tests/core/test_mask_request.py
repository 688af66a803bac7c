"""A mask as callers ask for it: what is refused, and what is left of it at the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.mask_request import MaskRequest, mask_request
from core.selection import MAX_POINTS, MAX_WORDS, Point, Selection

INSIDE = st.tuples(st.floats(0, 200), st.floats(0, 100))


def test_pixels_become_shares_of_the_sides() -> None:
    asked = MaskRequest(prompt="a hat", points=((50, 25), (200, 100, -1)), box=(0, 10, 100, 100))
    assert asked.within(200, 100) == Selection(
        "a hat", (Point(0.25, 0.25), Point(1.0, 1.0, adds=False)), (0.0, 0.1, 0.5, 1.0)
    )


def test_nothing_asked_is_no_request() -> None:
    assert mask_request() is None
    assert mask_request(points=((1.0, 2.0),)) == MaskRequest(points=((1.0, 2.0),))


@given(st.lists(INSIDE, min_size=1, max_size=MAX_POINTS))
def test_every_point_of_the_picture_is_taken(points: list[tuple[float, float]]) -> None:
    selection = MaskRequest(points=tuple(points)).within(200, 100)
    assert all(0 <= point.x <= 1 and 0 <= point.y <= 1 and point.adds for point in selection.points)
    assert selection.kinds == {"points"}


@pytest.mark.parametrize(
    ("param", "given_"),
    [
        ("mask_prompt", {"prompt": " "}),
        ("mask_prompt", {"prompt": "a" * (MAX_WORDS + 1)}),
        ("mask_points", {"points": ((0, 0),) * (MAX_POINTS + 1)}),
        ("mask_points", {"points": ((0, 0),) * 1000}),
        ("mask_points", {"points": ((0,),)}),
        ("mask_points", {"points": ((0, 0, 1, 1),)}),
        ("mask_points", {"points": ((0, 0, 2),)}),
        ("mask_points", {"points": ((0, 0, -1),)}),
        ("mask_box", {"box": (10, 10, 10, 20)}),
        ("mask_box", {"box": (20, 10, 10, 20)}),
        ("mask_box", {"box": (0, float("nan"), 10, 20)}),
    ],
)
def test_what_cannot_be_meant_is_refused(param: str, given_: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MaskRequest(**given_)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize("point", [(-0.1, 0), (0, 100.5), (201, 50), (float("nan"), 1), (float("inf"), 1)])
def test_points_outside_are_refused(point: tuple[float, float]) -> None:
    with pytest.raises(InvalidRequestError, match="outside the picture, which has 200x100 pixels") as caught:
        MaskRequest(points=((1, 1), point)).within(200, 100)
    assert caught.value.param == "mask_points"


def test_a_box_outside_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MaskRequest(box=(0, 0, 201, 50)).within(200, 100)
    assert caught.value.param == "mask_box"


def test_what_is_left_out_needs_something_to_leave_it_out_of() -> None:
    assert MaskRequest(prompt="a hat", points=((0, 0, -1),)).within(10, 10).words == "a hat"
    assert MaskRequest(box=(0, 0, 5, 5), points=((0, 0, -1),)).within(10, 10).box
