"""Times in messages are moved, all of them, and the birth of an engine is estimated from messages that come late."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from fakes import PIXELS, make_edit

from core.costs import load_report
from core.costs.load_report import (
    Begun,
    EngineStats,
    LoadReport,
    QuarantinedModel,
    Queued,
    RankModel,
    RankStats,
    RequestLoad,
    SpareBytes,
    StepSample,
)
from core.failure import Failure
from core.messages import engine
from core.messages.engine import (
    Abort,
    Aborted,
    EngineFailed,
    EngineOutputs,
    Finished,
    PrimeTemplate,
    TimedMessage,
    moved,
)
from core.messages.engine_birth import WINDOW_SECONDS, EngineBirth

LOAD = RequestLoad(steps_left=4, step_seconds=0.5, other_seconds=1.0, arrival=100.0)
REPORT = LoadReport(
    num_received=2,
    num_running=1,
    num_waiting=1,
    running={"r": LOAD},
    queue=(Queued("q", LOAD, 200.0), Begun("r", 1.0)),
    refused={"m": 300.0},
    room=SpareBytes(5, 10, 50.0),
)
STATS = EngineStats(
    op_seconds={},
    ranks=(
        RankStats((), 7.0, models=(RankModel("m", "resident", 1, 1, 5, 60.0), RankModel("n", "loading", 0, 0, 0, 0.0))),
    ),
    quarantine=(QuarantinedModel("m", "load", 1, 100.0, 300.0),),
    r_squared={},
    steps=1,
    batch_tokens=1,
    batch_requests=1,
    tokens_skipped=0,
    prime_chunks=0,
    busy_seconds={"denoise": 7.0},
    recent_steps=(StepSample(1, 1, 0.5, 0.5, 0.5, 400.0),),
)
FINISHED = Finished("r", {"queue": 7.0}, 3, False, "off", None, False, 0, made=500.0)
EDIT = msgspec.structs.replace(make_edit("r", arrival=100.0, deadline=200.0), objective=150.0)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> each plain value of a message."""
    match value:
        case dict():
            items: Any = value.items()
        case list() | tuple():
            items = enumerate(value)
        case _:
            return {path: value}
    return {name: leaf for key, each in items for name, leaf in leaves(each, f"{path}.{key}").items()}


@pytest.mark.parametrize(
    ("message", "times"),
    [
        (EDIT, ".arrival .deadline .objective"),
        (make_edit("r", arrival=100.0), ".arrival"),
        (PrimeTemplate("t", "m", PIXELS, 8, 8, "0", 1, 100.0), ".arrival"),
        (
            EngineOutputs((FINISHED, Aborted("a")), REPORT, STATS),
            ".outputs.0.made .load.running.r.5 .load.queue.0.2.5 .load.queue.0.3 .load.refused.m"
            " .load.room.2 .stats.ranks.0.models.0.5"
            " .stats.quarantine.0.3 .stats.quarantine.0.4 .stats.recent_steps.0.5",
        ),
        (EngineFailed(Failure("engine", "it"), (FINISHED,)), ".outputs.0.made"),
    ],
    ids=["edit", "edit without a deadline", "template", "outputs", "failed"],
)
def test_all_times_of_a_message_are_moved_and_nothing_else(message: TimedMessage, times: str) -> None:
    before, after = (leaves(msgspec.to_builtins(each)) for each in (message, moved(message, 8.0)))
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {*times.split()}
    assert all(after[path] - before[path] == 8.0 for path in changed)


def test_the_messages_have_no_other_times() -> None:
    """A new one belongs here and above."""
    numbers = {
        name
        for module in (load_report, engine)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
        for name, hint in get_type_hints(kind).items()
        if "float" in str(hint) and not name.endswith("seconds")
    }
    times = {"arrival", "deadline", "objective", "due", "refused", "made", "started", "since", "until", "used"}
    assert numbers - {"ms", "coefficients", "mask_score", "r_squared"} == times


def test_a_message_without_times_stays_as_it_is() -> None:
    message = Abort(("r",))
    assert moved(message, 8.0) is message


def test_the_message_that_was_least_late_counts() -> None:
    birth, rng = EngineBirth(), np.random.default_rng(0)
    for age in range(30):
        birth.note(float(age), 1000.0 + age + rng.exponential())
    assert birth.time == pytest.approx(1000.0, abs=0.3)


def test_no_age_of_a_message_lies_in_the_future() -> None:
    birth, rng = EngineBirth(), np.random.default_rng(1)
    for age in range(40):
        now = 1000.0 + age + rng.exponential()
        birth.note(float(age), now)
        assert birth.time + age <= now


def test_a_clock_that_drifts_is_followed() -> None:
    birth, slow = EngineBirth(), 1.0005
    for age in range(1000):
        birth.note(float(age), 1000.0 + age * slow)
    assert birth.time == pytest.approx(1000.0 + 999 * (slow - 1), abs=2 * WINDOW_SECONDS * (slow - 1))
