"""What is loaded and dropped, where, and for which requests, within a budget of bytes."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_kit import BROKEN, MODELS, SEGMENTER, TEXT, VAE, Rig, model, size_of, transformer

from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.messages.worker import Load
from core.scheduling.policies.where_needed import LEAST_PATIENCE_SECONDS, MOST_LOOKED_AT
from core.scheduling.ranks.quarantine import FIRST_WAIT_SECONDS
from core.scheduling.ranks.residency import Residency
from core.scheduling.requests.bindings import Needs


def failure_of(residency: Residency, needs: Needs, now: float, rank: int | None = None) -> Failure | None:
    refusal = residency.refusal_of_loads(needs, now, rank)
    return None if refusal is None else refusal.failure


# ------------------------------------------------------------------------------------------------- equal ranks


def test_with_everything_loaded_there_is_nothing_to_order() -> None:
    rig = Rig("a", "b", "c")
    assert rig.order([], [("a", 0.0)]) == ()
    assert rig.may_start("a")
    assert rig.has("a")


def test_what_a_request_waits_for_is_loaded_first_and_only_what_is_lacking() -> None:
    rig = Rig("a")
    loads = rig.order([], [("a", 0.0), ("c", 0.0)])
    assert loads == (Load((0,), MODELS["c"].components),)
    assert (rig.may_start("a"), rig.may_start("c")) == (True, False)
    assert rig.order([], [("c", 0.0)]) == (), "it is on its way"
    rig.answer(loads)
    assert rig.has("c")
    assert rig.order() == (Load((0,), (transformer("b"),)),), "b shares the rest with a"
    assert rig.may_start("c")


def test_models_are_loaded_in_their_order_while_nothing_waits() -> None:
    rig, loaded = Rig("a"), []
    while loads := rig.order():
        loaded.append(loads[0].load[-1].content)
        rig.answer(loads)
    assert loaded == ["b", "c"]


def test_the_least_recently_used_makes_room() -> None:
    rig = Rig("a", "b", budget=24, models=MODELS | {"d": model("d")})
    for name in ("b", "a"):
        rig.residency.note_use(rig.bindings.keys(name, "transformer"), 0.0)
    assert rig.order([], [("d", 0.0)]) == (Load((0,), (transformer("d"),), (transformer("b"),)),)
    assert not rig.has("b")
    assert rig.residency.has(rig.bindings.keys("b", "vae"), [0]), "what a needs, too"


def test_what_runs_is_not_dropped_and_later_requests_go_ahead_for_a_while() -> None:
    rig = Rig("a", budget=14, seconds=2.0)
    waiting = [("c", 0.0), ("a", 1.0)]
    patience = 2 * 2.0  # c lacks two components
    assert rig.order(["a"], waiting, patience - 0.1) == ()
    assert rig.decided.again == patience
    assert rig.may_start("a")
    assert rig.order(["a"], waiting, patience) == ()
    assert not rig.may_start("a"), "the running ones end, and no other one begins"
    (load,) = rig.order([], waiting, patience)
    assert sum(map(size_of, load.drop)) == 12
    assert set(load.drop) < set(MODELS["a"].components)
    assert load.load == MODELS["c"].components


def test_what_runs_is_restored_first_when_its_rank_is_restarted() -> None:
    """Room is made for it, and requests wait that would take the room away: else its own would never end."""
    rig = Rig("a", "b", budget=24)
    waiting = [("b", 0.0)]
    (load,) = rig.order(["c"], waiting, LEAST_PATIENCE_SECONDS)
    assert load.load == MODELS["c"].components
    assert sum(map(size_of, load.drop)) >= 12
    rig.answer([load])
    assert rig.has("c")
    assert rig.order(["c"], waiting, LEAST_PATIENCE_SECONDS) == ()


def test_a_short_load_has_some_patience_too() -> None:
    rig = Rig("a", budget=14)
    rig.order(["a"], [("c", 0.0), ("a", 0.5)], LEAST_PATIENCE_SECONDS - 0.1)
    assert rig.may_start("a")


def test_nothing_is_dropped_for_a_model_that_nothing_waits_for() -> None:
    rig = Rig("a", budget=15)
    assert rig.order() == ()
    assert rig.may_start("a")


def test_a_failed_load_keeps_requests_out_and_is_tried_again_later() -> None:
    rig = Rig("c")
    (load,) = rig.order([], [("a", 0.0)])
    rig.note_loaded(0, TEXT)
    rig.residency.note_failed(0, VAE, BROKEN, 5.0)
    rig.note_loaded(0, load.load[2])
    assert failure_of(rig.residency, rig.needs("b"), 5.0) == BROKEN
    assert failure_of(rig.residency, rig.needs("c"), 5.0) is None
    assert rig.order([], [("a", 5.0)], 5.0) == ()
    later = 5.0 + FIRST_WAIT_SECONDS
    assert failure_of(rig.residency, rig.needs("a"), later) is None
    assert rig.order([], [("a", later)], later) == (Load((0,), (VAE,)),)
    rig.note_loaded(0, VAE)
    assert failure_of(rig.residency, rig.needs("a"), 5.0) is None


def test_a_load_that_fails_on_the_rank_of_a_requests_pages_is_not_repeated() -> None:
    rig = Rig("a", ranks=2, set_size=1, models={"a": MODELS["a"]})
    rig.residency.join(1, [LoadedComponent(key, size_of(key)) for key in (TEXT, VAE)])
    assert rig.order([(rig.needs("a"), 1)]) == (Load((1,), (transformer("a"),)),)
    rig.residency.note_failed(1, transformer("a"), BROKEN, 0.0)
    assert rig.order([(rig.needs("a"), 1)], now=1.0) == ()
    assert failure_of(rig.residency, rig.needs("a"), 1.0, 1) == BROKEN
    assert failure_of(rig.residency, rig.needs("a"), 1.0) is None, "it is on the other rank"
    assert [load.load for load in rig.order([(rig.needs("a"), 1)], now=FIRST_WAIT_SECONDS)] == [(transformer("a"),)]


def test_equal_ranks_count_when_all_have_it() -> None:
    rig = Rig("a", ranks=2, models={name: MODELS[name] for name in ("a", "c")})
    (load,) = rig.order([], [("c", 0.0)])
    assert load.ranks == (0, 1)
    rig.note_loaded(0, *load.load)
    assert rig.has("c", 0)
    assert not rig.has("c", 0, 1)
    rig.residency.lose(1)
    assert not rig.has("a", 1)
    rig.order([], [("c", 0.0)])
    assert rig.may_start("c"), "what the dead rank was loading is not awaited"
    rig.join(1)
    assert rig.order([], [("a", 0.0)]) == (Load((0, 1), MODELS["a"].components),)


@given(st.data(), st.sampled_from([0, 14, 16, 24, 30]), st.integers(1, 3), st.booleans())
def test_every_request_gets_its_model_within_the_budget(
    data: st.DataObject, budget: int, ranks: int, spreads: bool
) -> None:
    """Requests come at any time, run for any time, and are served in their order; loads end at any time."""
    rig, names = Rig("a", budget=budget, ranks=ranks, set_size=1 if spreads else 0, seconds=0.5), list(MODELS)
    arrivals = data.draw(st.lists(st.tuples(st.sampled_from(names), st.floats(0, 2)), max_size=12))
    waiting: list[tuple[str, float]] = []
    running: list[tuple[str, float]] = []  # (model, end)
    on_its_way: list[tuple[float, int, ModelKey]] = []
    for step in count():
        now = step * 0.25
        waiting += [(name, now) for name, when in arrivals if now - 0.25 < when <= now]
        running = [(name, end) for name, end in running if end > now]
        for each in [each for each in on_its_way if each[0] <= now]:
            on_its_way.remove(each)
            rig.note_loaded(*each[1:])
        loads = rig.order({name for name, _ in running}, waiting, now)
        for name, _ in running:
            assert not rig.residency.missing(rig.needs(name)), "it is in use"
        for load in loads:
            on_its_way += [
                (now + data.draw(st.sampled_from([0.0, 0.5, 1.0])), rank, key)
                for rank in load.ranks
                for key in load.load
            ]
        for rank in range(ranks) if budget else ():
            assert sum(map(size_of, rig.residency.present((rank,)))) <= budget
        for name, arrival in list(waiting):
            if rig.may_start(name) and len(running) < 2:
                assert not rig.residency.missing(rig.needs(name))
                waiting.remove((name, arrival))
                running.append((name, now + data.draw(st.sampled_from([0.25, 0.5, 2.0]))))
        if now > 2 and not waiting:
            break
        assert now < 120, f"starved: {waiting}"


@pytest.mark.parametrize("budget", [0, 14])
def test_a_stream_of_requests_for_one_model_does_not_keep_out_another(budget: int) -> None:
    rig, now, running = Rig("a", budget=budget, seconds=1.0), 0.0, 1
    waiting = [("c", 0.0)]
    while not rig.has("c"):
        now += 0.1
        rig.answer(rig.order(["a"] * running, [*waiting, ("a", now)], now))
        running = int(rig.may_start("a"))  # each ends at once, and the next one begins if it may
        assert now < 10


# ------------------------------------------------------------------------------------------------- ranks apart

FIVE = {name: model(name) for name in "abcde"}


def settle(rig: Rig) -> None:
    """Load all that is loaded without requests."""
    while loads := rig.order():
        rig.answer(loads)


def test_five_models_on_two_ranks_with_room_for_three_are_all_there() -> None:
    rig = Rig("a", budget=30, ranks=2, set_size=1, models=FIVE)
    settle(rig)
    assert sorted(rig.on(0) + rig.on(1)) == sorted("aabcde"), "the room left has a copy"
    assert rig.residency.states() == dict.fromkeys(FIVE, "loaded")
    for name in FIVE:
        assert rig.order([], [(name, 0.0)]) == ()
        assert rig.may_start(name), "no request waits for a load that another rank's copy avoids"


def test_room_is_made_where_what_is_dropped_was_used_least_recently() -> None:
    rig = Rig(budget=10, ranks=3, set_size=1, models=FIVE)
    for rank, name in enumerate("abc"):
        rig.join(rank, name)
    for name in "acb":
        rig.residency.note_use(rig.bindings.keys(name, "transformer"), 0.0)
    rig.residency.note_use(rig.bindings.keys("a", "transformer"), 0.0)
    assert rig.order([], [("d", 0.0)]) == (Load((2,), (transformer("d"),), (transformer("c"),)),)


def test_the_first_home_of_a_model_stays_the_first() -> None:
    """Its steps stay there, while copies come and go."""
    rig = Rig(ranks=3, set_size=1, models=FIVE)
    rig.note_loaded(2, transformer("a"))
    rig.note_loaded(0, transformer("a"))
    (keys,) = rig.needs("a")
    assert (rig.residency.homes(keys).ranks, rig.residency.homes(keys).whole) == ((2, 0), ((2,), (0,)))
    rig.residency.note_sent((2,), (), (transformer("a"),))
    rig.residency.note_sent((2,), (transformer("a"),), ())
    rig.note_loaded(2, transformer("a"))
    assert rig.residency.homes(keys).ranks == (0, 2)


def test_what_fits_everywhere_is_loaded_everywhere() -> None:
    rig = Rig("a", ranks=2, set_size=1, models=FIVE)
    settle(rig)
    assert (rig.on(0), rig.on(1)) == ("abcde", "abcde")
    assert rig.residency.is_complete


def test_a_copy_is_dropped_before_the_only_one() -> None:
    rig = Rig(budget=20, ranks=2, set_size=1, models={name: FIVE[name] for name in "abcd"})
    rig.join(0, "a", "b")
    rig.join(1, "b", "c")
    for name in "acb":  # b was used last
        rig.residency.note_use(rig.bindings.keys(name, "transformer"), 0.0)
    (load,) = rig.order([], [("d", 0.0)])
    assert load.drop == (transformer("b"),)
    assert not rig.residency.missing(rig.needs("b"))


def test_a_load_goes_where_nothing_is_dropped_for_it() -> None:
    rig = Rig(budget=20, ranks=2, set_size=1, models=FIVE)
    rig.join(0, "a", "b")
    rig.join(1, "c")
    assert rig.order(["c"], [("d", 0.0)]) == (Load((1,), (transformer("d"),)),)


def test_two_ranks_load_at_the_same_time() -> None:
    rig = Rig(budget=20, ranks=2, set_size=1, models=FIVE)
    loads = rig.order([], [("a", 0.0), ("b", 0.0), ("c", 0.0)])
    assert {load.ranks: load.load for load in loads} == {(0,): (transformer("a"),), (1,): (transformer("b"),)}
    assert rig.order([], [("c", 0.0)]) == (), "a rank loads what one request needs at a time"


def test_what_runs_keeps_the_place_where_it_runs() -> None:
    """Its other copy makes room."""
    rig = Rig(budget=10, ranks=2, set_size=1, models=FIVE)
    rig.join(0, "a")
    rig.join(1, "a")
    assert rig.order(["a"], [("b", 0.0)]) == (Load((1,), (transformer("b"),), (transformer("a"),)),)
    assert rig.order(["a", "b"], [("c", 0.0)]) == ()
    assert rig.may_start("a")


def test_a_copy_that_is_wanted_makes_room_of_other_copies_alone() -> None:
    rig = Rig(budget=10, ranks=4, set_size=1, models=FIVE)
    for rank, name in enumerate("aaab"):
        rig.join(rank, name)
    assert rig.order(["a"], copies=[("a", 3)]) == (), "nobody else has b"
    assert rig.order(copies=[("b", 0)]) == (), "its requests have ended"
    assert rig.order(["b"], copies=[("b", 0), ("b", 1), ("b", 2)]) == tuple(
        Load((rank,), (transformer("b"),), (transformer("a"),)) for rank in (0, 1)
    ), "one a stays"
    rig.residency.note_failed(0, transformer("b"), BROKEN, 0.0)
    loads = rig.order(["b"], copies=[("b", 0)])
    assert transformer("b") not in [key for load in loads for key in load.load], "it has failed"


def test_steps_that_one_rank_alone_can_make_get_their_model_there() -> None:
    rig = Rig(budget=20, ranks=2, set_size=1, models=FIVE)
    rig.join(0, "a")
    rig.join(1, "b", "c")
    loads = {load.ranks: load.load for load in rig.order([(rig.needs("a"), 1)])}
    assert loads[1,] == (transformer("a"),)


def test_the_parts_of_a_model_may_be_on_two_ranks() -> None:
    rig = Rig(budget=14, ranks=2, set_size=1, models={name: MODELS[name] for name in ("a", "b")})
    rig.join(0, "a")
    rig.note_loaded(1, transformer("b"))
    assert rig.order([], [("b", 0.0)]) == (Load((1,), (TEXT, VAE)),), "which is a copy: there is room"
    assert rig.may_start("b")


def test_what_dies_with_a_rank_is_loaded_on_another_that_has_room() -> None:
    rig = Rig(budget=20, ranks=2, set_size=1, models=FIVE)
    rig.join(0, "a")
    rig.join(1, "b")
    rig.residency.lose(1)
    assert rig.order(["b"]) == (Load((0,), (transformer("b"),)),)


def test_a_model_stays_available_where_it_can_be_loaded() -> None:
    """Rank 0 has room for b and cannot load it; rank 1 can, where it makes room."""
    rig = Rig(budget=10, ranks=2, set_size=1, models={name: FIVE[name] for name in "ab"})
    rig.join(1, "a")
    (load, *_) = rig.order([], [("b", 0.0)])
    assert load == Load((0,), (transformer("b"),))
    rig.residency.note_failed(0, transformer("b"), BROKEN, 0.0)
    assert failure_of(rig.residency, rig.needs("b"), 0.0) == BROKEN, "its files may be broken"
    now = FIRST_WAIT_SECONDS
    for _ in range(3):
        assert failure_of(rig.residency, rig.needs("b"), now) is None
        loads = {load.ranks: load.load for load in rig.order([], [("b", now)], now)}
        assert loads[1,] == (transformer("b"),)
        assert transformer("b") not in loads.get((0,), ())
        rig.note_loaded(1, transformer("b"))
        rig.join(0)
        rig.join(1, "a")
    loads = {load.ranks: load.load for load in rig.order([(rig.needs("b"), 0)], [], now)}
    assert loads[0,] == (transformer("b"),), "for steps that this rank alone can make"


def test_what_failed_on_a_rank_is_copied_to_others_at_once_and_there_after_a_wait() -> None:
    rig = Rig("a", ranks=3, set_size=1, models={name: FIVE[name] for name in "ab"})
    for load in rig.order():
        assert load.load == (transformer("b"),)
    residency = rig.residency
    for rank in (0, 2):
        residency.note_failed(rank, transformer("b"), BROKEN, 0.0)
    assert rig.order([], [], 100.0) == (), "not without a request"
    rig.note_loaded(1, transformer("b"))
    assert residency.states() == {"a": "loaded", "b": "loaded"}
    assert rig.order([], [], 1.0) == ()
    assert failure_of(residency, rig.needs("b"), 1.0) is None
    assert failure_of(residency, rig.needs("b"), 1.0, 0) == BROKEN, "for steps that this rank alone can make"
    assert residency.quarantine.refuses_loads(1.0)
    later = FIRST_WAIT_SECONDS
    assert {load.ranks for load in rig.order([], [], later)} == {(0,), (2,)}
    residency.note_failed(0, transformer("b"), BROKEN, later)
    rig.note_loaded(2, transformer("b"))
    assert rig.order([], [], later + FIRST_WAIT_SECONDS) == (), "for longer each time"
    assert rig.order([], [], later + 2 * FIRST_WAIT_SECONDS) == (Load((0,), (transformer("b"),)),)
    rig.note_loaded(0, transformer("b"))
    assert residency.is_complete


def test_a_request_waits_for_a_set_that_loads_its_model_while_another_one_fails() -> None:
    rig = Rig("a", ranks=2, set_size=1, models={name: FIVE[name] for name in "ab"})
    assert len(rig.order()) == 2, "a copy each"
    refusal = rig.residency.note_failed(0, transformer("b"), BROKEN, 0.0)
    assert failure_of(rig.residency, rig.needs("b"), 0.0) is None
    assert rig.residency.refused(refusal) == []
    rig.residency.note_failed(1, transformer("b"), BROKEN, 0.1)
    assert failure_of(rig.residency, rig.needs("b"), 0.1) == BROKEN
    assert rig.residency.refused(refusal) == ["b"]


def test_sets_of_two_ranks_load_together() -> None:
    rig = Rig(budget=10, ranks=4, set_size=2, models={name: FIVE[name] for name in "ab"})
    loads = rig.order([], [("a", 0.0), ("b", 0.0)])
    assert {load.ranks: load.load for load in loads} == {(0, 1): (transformer("a"),), (2, 3): (transformer("b"),)}
    rig.note_loaded(0, transformer("a"))
    rig.order([], [("a", 0.0), ("b", 0.0)])
    assert not rig.may_start("a"), "both ranks compute its steps"
    rig.answer(loads)
    rig.order([], [("a", 0.0), ("b", 0.0)])
    assert rig.may_start("a")


# ------------------------------------------------------------------------------------------------- on demand


def test_what_only_some_requests_need_is_loaded_for_the_first_of_them() -> None:
    rig = Rig("a", models={"a": MODELS["a"]})
    assert rig.order() == (), "no request has needed it"
    needs = (*rig.needs("a"), *rig.segmenter)
    rig.residency.note_wanted(needs)
    loads = rig.order([], [(needs, 0.0), ("a", 0.0)])
    assert loads == (Load((0,), (SEGMENTER,)),)
    assert (rig.may_start(needs), rig.may_start("a")) == (False, True), "others go ahead"
    rig.answer(loads)
    assert rig.residency.is_complete
    assert rig.may_start(needs)
    rig.residency.lose(0)
    rig.join(0, "a")
    assert rig.order() == (Load((0,), (SEGMENTER,)),), "a rank that is restarted gets it, too"


def test_a_failed_component_of_some_requests_leaves_the_others() -> None:
    rig = Rig("a", models={"a": MODELS["a"]})
    needs = (*rig.needs("a"), *rig.segmenter)
    rig.residency.note_wanted(needs)
    rig.order([], [(needs, 0.0)])
    rig.residency.note_failed(0, SEGMENTER, BROKEN, 1.0)
    assert failure_of(rig.residency, needs, 1.0) == BROKEN
    assert failure_of(rig.residency, rig.needs("a"), 1.0) is None
    assert rig.residency.is_complete
    assert rig.residency.states() == {"a": "loaded"}
    later = 1.0 + FIRST_WAIT_SECONDS
    rig.residency.note_wanted(needs)
    assert rig.order([], [(needs, later)], later) == (Load((0,), (SEGMENTER,)),)


def test_what_is_loaded_on_demand_makes_room_for_models() -> None:
    rig = Rig("a", budget=14, models={name: MODELS[name] for name in ("a", "c")})
    rig.residency.note_wanted(rig.segmenter)
    rig.answer(rig.order([], [(rig.segmenter, 0.0)]))
    (load,) = rig.order([], [("c", 0.0)])
    assert load.load == MODELS["c"].components
    assert SEGMENTER in load.drop
    rig.answer([load])
    assert rig.order() == (), "and is not loaded again where there is no room for it"
    assert not rig.residency.has(rig.segmenter[0], [0])


def test_whoever_has_all_it_needs_may_begin_behind_however_many_others() -> None:
    rig = Rig("a", models={name: MODELS[name] for name in ("a", "c")})
    needs = (*rig.segmenter, *rig.needs("a"))
    rig.residency.note_wanted(needs)
    rig.note_loaded(0, SEGMENTER)
    rig.order([], [*[("a", 0.0)] * MOST_LOOKED_AT, (needs, 0.0)])
    assert not rig.residency.is_complete, "c is on its way"
    assert rig.may_start(needs)
    assert not rig.may_start((*needs, *rig.needs("c")))


def test_what_a_waiting_request_needs_is_loaded_again_after_it_made_room() -> None:
    """Its order was sent in a pass that looked at the request behind."""
    rig = Rig("a", budget=17, models={name: MODELS[name] for name in ("a", "c")})
    needs = (*rig.needs("a"), *rig.segmenter)
    rig.residency.note_wanted(needs)
    rig.note_loaded(0, SEGMENTER)
    rig.answer(rig.order([], [("c", 0.0)]))
    assert rig.residency.missing(needs)
    rig.answer(rig.order([], [(needs, 1.0)], 1.0))
    assert not rig.residency.missing(needs)


def test_what_exceeds_the_budget_by_itself_is_refused_and_holds_up_nobody() -> None:
    """A model fits, and with its segmenter it does not."""
    rig = Rig("a", budget=16, models={"a": MODELS["a"]})
    failure = failure_of(rig.residency, (*rig.needs("a"), *rig.segmenter), 0.0)
    assert failure is not None
    assert "--model-bytes allows 16" in failure.message
    assert failure_of(rig.residency, rig.needs("a"), 0.0) is None
    assert failure_of(rig.residency, rig.segmenter, 0.0) is None
