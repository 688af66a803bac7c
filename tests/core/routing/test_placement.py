"""Where engines are to be: from what is there now to what is to be done."""

from __future__ import annotations

import pytest

from core.routing.placement import Changes, EnginePlace, Machine, changes

A, B = Machine("10.0.0.1", 1), Machine("10.0.0.2", 3)
LEAVING = Machine("10.0.0.3", 2, is_draining=True)

SERVED, STARTING, GONE = EnginePlace("a", "served"), EnginePlace("a", "starting"), EnginePlace("a", "gone")
OF_B = EnginePlace("b", "served")
DRAINING = EnginePlace("c", "draining")
NONE = Changes((), (), ())


@pytest.mark.parametrize(
    ("engines", "start"),
    [
        ({}, "a"),  # one alone, as long as none has served
        ({0: STARTING}, ""),
        ({0: SERVED}, "b"),  # the first of a machine measures, and the others wait for it
        ({0: SERVED, 1: EnginePlace("b", "starting")}, ""),
        ({0: SERVED, 1: OF_B}, "bb"),
        ({0: SERVED, 1: OF_B, 2: OF_B, 5: OF_B}, ""),
        ({0: GONE, 1: OF_B, 2: OF_B}, "b"),
        ({0: SERVED, 1: EnginePlace("b", "gone")}, ""),
        ({0: EnginePlace("a", "waiting")}, "b"),  # for what other programs have
        ({0: EnginePlace("a", "waiting"), 1: EnginePlace("b", "starting")}, ""),
        ({0: EnginePlace("a", "waiting"), 1: OF_B}, "bb"),
        ({0: SERVED, 1: EnginePlace("b", "waiting")}, ""),
    ],
)
def test_machines_get_the_engines_that_they_have_room_for(engines: dict[int, EnginePlace], start: str) -> None:
    assert changes({"a": A, "b": B}, engines, 256) == Changes(tuple(start), (), ())


def test_there_are_no_more_engines_than_may_be() -> None:
    assert changes({"a": A, "b": B}, {0: SERVED, 1: OF_B}, 3).start == ("b",)
    assert changes({"a": A, "b": B}, {0: SERVED, 1: OF_B}, 2) == NONE
    assert changes({"none": Machine("10.0.0.4", 0)}, {}, 256) == NONE


@pytest.mark.parametrize(
    ("engine", "todo"),
    [
        (EnginePlace("c", "served"), Changes((), (7,), ())),
        (EnginePlace("c", "served", is_idle=True), Changes((), (7,), ())),
        (DRAINING, NONE),
        (EnginePlace("c", "draining", is_idle=True), Changes((), (), (7,))),
        (EnginePlace("c", "starting"), Changes((), (), (7,))),
        (EnginePlace("c", "waiting"), Changes((), (), (7,))),
        (EnginePlace("c", "gone"), Changes((), (), (7,))),
    ],
)
def test_engines_of_a_machine_that_is_about_to_leave_do_what_they_have_and_end(
    engine: EnginePlace, todo: Changes
) -> None:
    assert changes({"a": A, "c": LEAVING}, {0: SERVED, 7: engine}, 256) == todo


def test_a_machine_that_stays_after_all_gets_engines_again() -> None:
    stays = {"a": A, "c": Machine("10.0.0.3", 1)}
    assert changes(stays, {0: SERVED, 7: DRAINING}, 256) == NONE
    assert changes(stays, {0: SERVED, 7: EnginePlace("c", "draining", is_idle=True)}, 256) == Changes(("c",), (), (7,))


@pytest.mark.parametrize("state", ["waiting", "starting", "served", "draining", "gone"])
def test_engines_of_a_machine_that_has_left_end_at_once(state: str) -> None:
    lost = EnginePlace("c", state)  # type: ignore[arg-type]
    assert changes({"a": A}, {0: SERVED, 7: lost}, 256) == Changes((), (), (7,))
