"""What an engine tells of its models: which it has, and when the others could be used."""

from __future__ import annotations

import msgspec
import pytest
from load_kit import BROKEN, MODELS, SEGMENTER, Rig, model, transformer

from core.costs.load_report import ModelLoad, SpareBytes
from core.handles import ModelKey
from core.scheduling.reports.load_times import GUESSED_BYTES_PER_SECOND, LoadTimes
from core.scheduling.requests.bindings import Needs

MANY = {name: model(name) for name in "abcdef"}


def loads_of(rig: Rig, *waiting: str) -> tuple[float | None, dict[str, tuple[str, float]]]:
    """A first report while requests wait for these models: model -> (state, seconds)."""
    return told(LoadTimes(rig.bindings, rig.residency), rig, *waiting)


def told(times: LoadTimes, rig: Rig, *waiting: str) -> tuple[float | None, dict[str, tuple[str, float]]]:
    seconds, models = times.take([rig.needs(name) for name in waiting])
    return seconds, {load.name: (load.state, load.seconds) for load in models}


def test_what_is_not_loaded_takes_the_time_of_what_it_lacks() -> None:
    """Model b shares two components with a, c shares none."""
    seconds, models = loads_of(Rig("a", seconds=0.5))
    assert seconds == 0.0
    assert models == {"a": ("loaded", 0.0), "b": ("unloaded", 0.5), "c": ("unloaded", 1.0)}


def test_loads_that_requests_wait_for_come_first_and_in_their_order() -> None:
    rig = Rig("a", seconds=0.5, models=MANY)
    seconds, models = loads_of(rig, "c", "a", "b")
    assert seconds == 1.0
    assert [models[name] for name in "abcd"] == [
        ("loaded", 0.0),
        ("loading", 1.0),
        ("loading", 0.5),
        ("unloaded", 0.5),
    ]


def test_what_ranks_are_loading_comes_before() -> None:
    rig = Rig("a", seconds=0.5, models=MANY)
    rig.order([], [("b", 0.0)])
    assert loads_of(rig, "b", "c") == (
        1.0,
        dict.fromkeys("def", ("unloaded", 0.5))
        | {"a": ("loaded", 0.0)}
        | {"b": ("loading", 0.5), "c": ("loading", 1.0)},
    )


def test_sets_of_ranks_load_beside_each_other() -> None:
    rig = Rig("a", seconds=0.5, models=MANY, ranks=2, set_size=1)
    seconds, models = loads_of(rig, "b", "c", "d")
    assert seconds == 0.5, "the other set is free earlier"
    assert [models[name] for name in "bcde"] == [
        ("loading", 0.5),
        ("loading", 0.5),
        ("loading", 1.0),
        ("unloaded", 0.5),
    ]


def test_which_ranks_can_make_steps_is_told_where_not_all_can() -> None:
    rig = Rig("a", seconds=0.5, models=MANY, ranks=2, set_size=1)
    times = LoadTimes(rig.bindings, rig.residency)
    assert {load.ranks for load in times.take(())[1]} == {()}
    rig.note_loaded(1, transformer("b"))
    assert [(load.name, load.state, load.ranks) for load in times.take(())[1]] == [("b", "loaded", (1,))]
    rig.note_loaded(0, transformer("b"))
    assert [(load.name, load.state, load.ranks) for load in times.take(())[1]] == [("b", "loaded", ())]


def test_only_changes_are_told() -> None:
    rig = Rig("a", seconds=0.5, models=MANY)
    times = LoadTimes(rig.bindings, rig.residency)
    assert len(told(times, rig)[1]) == len(MANY)
    assert told(times, rig) == (None, {})
    assert told(times, rig, "a") == (None, {}), "requests of a loaded model change nothing"
    assert told(times, rig, "b") == (0.5, {"b": ("loading", 0.5)})
    orders = rig.order([], [("b", 0.0)])
    assert told(times, rig, "b") == (0.5, {}), "it was as good as ordered"
    rig.answer(orders)
    assert told(times, rig, "b") == (0.0, {"b": ("loaded", 0.0)})


def test_a_small_change_of_all_predictions_is_not_told() -> None:
    predicted = [0.5]
    rig = Rig("a", models=MANY)
    rig.residency._predict = lambda nbytes: predicted[0]
    times = LoadTimes(rig.bindings, rig.residency)
    told(times, rig)
    predicted[0] = 0.54
    rig.note_loaded(0, transformer("b"))
    assert told(times, rig)[1] == {"b": ("loaded", 0.0)}
    predicted[0] = 0.6
    rig.note_loaded(0, transformer("c"))
    assert told(times, rig)[1] == {"c": ("loaded", 0.0)} | dict.fromkeys("def", ("unloaded", 0.6))


def test_a_failed_load_is_told_until_it_is_tried_again() -> None:
    rig = Rig("a", seconds=0.5, models=MANY)
    rig.order([], [("b", 0.0)])
    rig.residency.note_failed(0, transformer("b"), BROKEN, 0.0)
    assert loads_of(rig)[1]["b"] == ("failed", 0.5)
    assert loads_of(rig, "b")[1]["b"] == ("loading", 0.5)


def test_before_any_load_its_size_tells() -> None:
    rig = Rig("a", models={name: model(name) for name in "ab"})
    assert loads_of(rig)[1]["b"] == ("unloaded", pytest.approx(max(10 / GUESSED_BYTES_PER_SECOND, 1e-3)))


def test_a_segmenter_is_told_apart_from_its_model() -> None:
    models = {"a": msgspec.structs.replace(MODELS["a"], segmenter=(SEGMENTER,))}
    rig = Rig("a", seconds=0.5, models=models)
    times = LoadTimes(rig.bindings, rig.residency)
    own = (rig.bindings.keys("a", "segmenter"),)
    assert times.take([]) == (
        0.0,
        (ModelLoad("a", "model", "loaded", 0.0), ModelLoad("a", "segmenter", "unloaded", 0.5)),
    )
    rig.residency.note_wanted(own)
    assert times.take([(*rig.needs("a"), *own)]) == (0.5, (ModelLoad("a", "segmenter", "loading", 0.5),))
    rig.note_loaded(0, SEGMENTER)
    assert times.take([own]) == (0.0, (ModelLoad("a", "segmenter", "loaded", 0.0),))


def test_each_controlnet_is_told_apart_from_its_model() -> None:
    nets = {name: ModelKey(name, "controlnet") for name in ("edges", "depth")}
    models = {"a": msgspec.structs.replace(MODELS["a"], controlnets=nets)}
    rig = Rig("a", seconds=0.5, models=models)
    times = LoadTimes(rig.bindings, rig.residency)
    assert times.take([])[1] == (
        ModelLoad("a", "model", "loaded", 0.0),
        ModelLoad("a", "controlnet", "unloaded", 0.5, "edges"),
        ModelLoad("a", "controlnet", "unloaded", 0.5, "depth"),
    )
    wanted = (rig.bindings.controlnets("a", ("edges",)),)
    rig.residency.note_wanted(wanted)
    assert times.take([wanted]) == (0.5, (ModelLoad("a", "controlnet", "loading", 0.5, "edges"),))
    rig.note_loaded(0, nets["edges"])
    assert times.take([wanted]) == (0.0, (ModelLoad("a", "controlnet", "loaded", 0.0, "edges"),))


def test_nothing_is_lacking_without_a_living_rank() -> None:
    rig = Rig("a", seconds=0.5, models=MANY)
    rig.residency.lose(0)
    assert set(loads_of(rig, "b")[1].values()) == {("loaded", 0.0)}


def test_room_is_what_holds_nothing_and_what_no_request_needs() -> None:
    """Of 60 bytes, a and b take 24: 4 of what they share, and a transformer of 10 each; c takes 12."""
    rig = Rig("a", "b", budget=60)
    rig.residency.note_use(rig.bindings.keys("a", "transformer"), 7.0)
    rig.residency.note_use(rig.bindings.keys("b", "transformer"), 3.0)
    for key in ("text_encoder", "vae"):
        rig.residency.note_use(rig.bindings.keys("a", key), 9.0)
    times = LoadTimes(rig.bindings, rig.residency)
    assert room_beside(times) == SpareBytes(36, 60, 3.0)
    assert room_beside(times, rig.needs("a")) == SpareBytes(36, 46, 3.0)
    assert room_beside(times, rig.needs("b")) == SpareBytes(36, 46, 7.0)
    assert room_beside(times, rig.needs("a"), rig.needs("c")) == SpareBytes(24, 34, 3.0), "c will be loaded"
    assert room_beside(LoadTimes(rig.bindings, Rig("a").residency)) is None


def room_beside(times: LoadTimes, *needs: Needs) -> SpareBytes | None:
    """When the live requests need these."""
    times.take(needs)
    return times.room(needs)


def test_a_load_without_room_waits_until_what_runs_is_done() -> None:
    rig = Rig("a", budget=20, seconds=0.5)
    times = LoadTimes(rig.bindings, rig.residency)
    needs = (rig.needs("a"), rig.needs("c"))
    seconds, models = times.take(needs, 8.0)
    assert (seconds, times.seconds) == (9.0, 1.0), "two components of half a second each"
    assert ("c", "loading", 9.0, 0) in [(load.name, load.state, load.seconds, load.nbytes) for load in models]
    assert ("b", "unloaded", 0.5, 10) in [(load.name, load.state, load.seconds, load.nbytes) for load in models]


def test_a_load_with_room_does_not() -> None:
    rig = Rig("a", budget=26, seconds=0.5)
    assert LoadTimes(rig.bindings, rig.residency).take((rig.needs("a"), rig.needs("c")), 8.0)[0] == 1.0
