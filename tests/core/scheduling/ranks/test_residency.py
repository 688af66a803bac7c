"""What is loaded and dropped, for which requests, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import msgspec
import pytest
from fakes import MODEL
from hypothesis import given
from hypothesis import strategies as st

from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.model_info import ModelInfo
from core.scheduling.ranks.residency import (
    LEAST_PATIENCE_SECONDS,
    MOST_LOOKED_AT,
    RETRY_SECONDS,
    ModelOrders,
    Residency,
)
from core.scheduling.requests.bindings import Bindings, ModelKeys

TEXT, VAE = ModelKey("0", "text_encoder"), ModelKey("0", "vae")
BROKEN = Failure("config", "cannot load it")


def model(name: str, *components: ModelKey) -> ModelInfo:
    return msgspec.structs.replace(MODEL, name=name, components=(*components, ModelKey(name, "transformer")))


MODELS = {"a": model("a", TEXT, VAE), "b": model("b", TEXT, VAE), "c": model("c", ModelKey("c", "vae"))}
SIZES = {key: 10 if key.component == "transformer" else 2 for info in MODELS.values() for key in info.components}


def make(
    *loaded: str, budget: int = 0, ranks: int = 1, models: dict[str, ModelInfo] = MODELS, seconds: float = 0.0
) -> Residency:
    """With these models loaded on all ranks. seconds: predicted of every load."""
    residency = Residency(
        models, ranks, [LoadedComponent(key, size) for key, size in SIZES.items()], budget, lambda nbytes: seconds
    )
    for rank in range(ranks):
        residency.join(rank, [LoadedComponent(key, SIZES[key]) for name in loaded for key in models[name].components])
    return residency


def keys(name: str, component: str) -> ModelKeys:
    return Bindings(MODELS).keys(name, component)


def answer(residency: Residency, orders: ModelOrders, ranks: Iterable[int] = (0,)) -> None:
    for rank in ranks:
        for key in orders.load:
            residency.note_loaded(rank, LoadedComponent(key, SIZES[key]))


def order(
    residency: Residency, running: Iterable[str], waiting: Iterable[tuple[str, float]], now: float
) -> ModelOrders:
    """Requests of these models need all components of theirs."""
    models = residency.models
    return residency.order(
        [models[name].needs for name in running], ((models[name].needs, since) for name, since in waiting), now
    )


def transformer(name: str) -> ModelKey:
    return ModelKey(name, "transformer")


def test_with_everything_loaded_there_is_nothing_to_order() -> None:
    residency = make("a", "b", "c")
    assert order(residency, [], [("a", 0.0)], 0.0) == ModelOrders()
    assert residency.may_start(MODELS["a"].needs)
    assert residency.has(keys("a", "vae"), [0])


def test_what_a_request_waits_for_is_loaded_first_and_only_what_is_lacking() -> None:
    residency = make("a")
    orders = order(residency, [], [("a", 0.0), ("c", 0.0)], 0.0)
    assert orders == ModelOrders(load=MODELS["c"].components)
    assert (residency.may_start(MODELS["a"].needs), residency.may_start(MODELS["c"].needs)) == (True, False)
    assert order(residency, [], [("c", 0.0)], 0.0) == ModelOrders(), "it is on its way"
    answer(residency, orders)
    assert residency.has(keys("c", "transformer"), [0])
    assert order(residency, [], [], 0.0) == ModelOrders(load=(transformer("b"),)), "b shares the rest with a"
    assert residency.may_start(MODELS["c"].needs)


def test_models_are_loaded_in_their_order_while_nothing_waits() -> None:
    residency, loaded = make("a"), []
    while (orders := order(residency, [], [], 0.0)) != ModelOrders():
        loaded.append(orders.load[-1].content)
        answer(residency, orders)
    assert loaded == ["b", "c"]


def test_the_least_recently_used_makes_room() -> None:
    models = MODELS | {"d": model("d")}
    SIZES[transformer("d")] = 10
    residency = make("a", "b", budget=24, models=models)
    for name in ("b", "a"):
        residency.note_use(keys(name, "transformer"))
    assert order(residency, [], [("d", 0.0)], 0.0) == ModelOrders(load=(transformer("d"),), unload=(transformer("b"),))
    assert not residency.has(keys("b", "transformer"), [0])
    assert residency.has(keys("b", "vae"), [0]), "what a needs, too"


def test_what_runs_is_not_dropped_and_later_requests_go_ahead_for_a_while() -> None:
    residency = make("a", budget=14, seconds=2.0)
    waiting = [("c", 0.0), ("a", 1.0)]
    patience = 2 * 2.0  # c lacks two components
    assert order(residency, ["a"], waiting, patience - 0.1) == ModelOrders()
    assert residency.may_start(MODELS["a"].needs)
    assert order(residency, ["a"], waiting, patience) == ModelOrders()
    assert not residency.may_start(MODELS["a"].needs), "the running ones end, and no other one begins"
    orders = order(residency, [], waiting, patience)
    assert sum(map(SIZES.get, orders.unload)) == 12  # type: ignore[arg-type]
    assert set(orders.unload) < set(MODELS["a"].components)
    assert orders.load == MODELS["c"].components


def test_what_runs_is_restored_first_when_its_rank_is_restarted() -> None:
    """Room is made for it, and requests wait that would take the room away: else its own would never end."""
    residency = make("a", "b", budget=24)
    waiting = [("b", 0.0)]
    orders = order(residency, ["c"], waiting, LEAST_PATIENCE_SECONDS)
    assert orders.load == MODELS["c"].components
    assert sum(map(SIZES.get, orders.unload)) >= 12  # type: ignore[arg-type]
    answer(residency, orders)
    assert residency.has(keys("c", "transformer"), [0])
    assert order(residency, ["c"], waiting, LEAST_PATIENCE_SECONDS) == ModelOrders()


def test_a_short_load_has_some_patience_too() -> None:
    residency = make("a", budget=14)
    order(residency, ["a"], [("c", 0.0), ("a", 0.5)], LEAST_PATIENCE_SECONDS - 0.1)
    assert residency.may_start(MODELS["a"].needs)


def test_nothing_is_dropped_for_a_model_that_nothing_waits_for() -> None:
    residency = make("a", budget=15)
    assert order(residency, [], [], 0.0) == ModelOrders()
    assert residency.may_start(MODELS["a"].needs)


def test_a_failed_load_keeps_requests_out_and_is_tried_again_later() -> None:
    residency = make("c")
    orders = order(residency, [], [("a", 0.0)], 0.0)
    residency.note_loaded(0, LoadedComponent(TEXT, 2))
    residency.note_failed(0, VAE, BROKEN, 5.0)
    residency.note_loaded(0, LoadedComponent(orders.load[2], 10))
    assert residency.failure_of(MODELS["b"].needs, 5.0) == BROKEN
    assert residency.failure_of(MODELS["c"].needs, 5.0) is None
    assert order(residency, [], [("a", 5.0)], 5.0) == ModelOrders()
    later = 5.0 + RETRY_SECONDS
    assert residency.failure_of(MODELS["a"].needs, later) is None
    assert order(residency, [], [("a", later)], later) == ModelOrders(load=(VAE,))
    residency.note_loaded(0, LoadedComponent(VAE, 2))
    assert residency.failure_of(MODELS["a"].needs, 5.0) is None


def test_a_component_counts_when_every_living_rank_has_it() -> None:
    residency = make("a", ranks=2, models={name: MODELS[name] for name in ("a", "c")})
    orders = order(residency, [], [("c", 0.0)], 0.0)
    answer(residency, orders, [0])
    assert residency.has(keys("c", "vae"), [0])
    assert not residency.has(keys("c", "vae"), [0, 1])
    residency.lose(1)
    assert not residency.has(keys("a", "vae"), [1])
    assert not residency.is_loading, "what the dead rank was loading is not awaited"
    order(residency, [], [("c", 0.0)], 0.0)
    assert residency.may_start(MODELS["c"].needs)
    residency.join(1, [])
    assert order(residency, [], [("a", 0.0)], 0.0) == ModelOrders(load=MODELS["a"].components)


def test_what_is_lacking_is_predicted() -> None:
    residency = make("a", seconds=0.5)
    assert [residency.seconds_left(MODELS[name].needs) for name in MODELS] == [0.0, 0.5, 1.0]


@given(st.data(), st.sampled_from([0, 14, 16, 24, 30]), st.integers(1, 3))
def test_every_request_gets_its_model_within_the_budget(data: st.DataObject, budget: int, ranks: int) -> None:
    """Requests come at any time, run for any time, and are served in their order; loads end at any time."""
    residency, names = make("a", budget=budget, ranks=ranks, seconds=0.5), list(MODELS)
    arrivals = data.draw(st.lists(st.tuples(st.sampled_from(names), st.floats(0, 2)), max_size=12))
    waiting: list[tuple[str, float]] = []
    running: list[tuple[str, float]] = []  # (model, end)
    on_its_way: list[tuple[float, ModelKey]] = []
    for step in count():
        now = step * 0.25
        waiting += [(name, now) for name, when in arrivals if now - 0.25 < when <= now]
        running = [(name, end) for name, end in running if end > now]
        for each in [each for each in on_its_way if each[0] <= now]:
            on_its_way.remove(each)
            for rank in range(ranks):
                residency.note_loaded(rank, LoadedComponent(each[1], SIZES[each[1]]))
        orders = order(residency, {name for name, _ in running}, waiting, now)
        for key in orders.unload:
            assert all(key not in MODELS[name].components for name, _ in running), "it is in use"
        on_its_way += [(now + data.draw(st.sampled_from([0.0, 0.5, 1.0])), key) for key in orders.load]
        if budget:
            assert sum(SIZES[key] for key in residency.present) <= budget
        for name, arrival in list(waiting):
            if residency.may_start(residency.models[name].needs) and len(running) < 2:
                assert residency.has(keys(name, "transformer"), range(ranks))
                waiting.remove((name, arrival))
                running.append((name, now + data.draw(st.sampled_from([0.25, 0.5, 2.0]))))
        if now > 2 and not waiting:
            break
        assert now < 120, f"starved: {waiting}"


@pytest.mark.parametrize("budget", [0, 14])
def test_a_stream_of_requests_for_one_model_does_not_keep_out_another(budget: int) -> None:
    residency, now, running = make("a", budget=budget, seconds=1.0), 0.0, 1
    waiting = [("c", 0.0)]
    while not residency.has(keys("c", "transformer"), [0]):
        now += 0.1
        orders = order(residency, ["a"] * running, [*waiting, ("a", now)], now)
        answer(residency, orders)
        running = int(residency.may_start(MODELS["a"].needs))  # each ends at once, and the next one begins if it may
        assert now < 10


SEGMENTER = ModelKey("s", "segmenter")


def test_what_only_some_requests_need_is_loaded_for_the_first_of_them() -> None:
    residency = make("a", models={"a": MODELS["a"]})
    assert residency.order([], [], 0.0) == ModelOrders(), "no request has needed it"
    needs = (*MODELS["a"].needs, SEGMENTER)
    residency.note_wanted(needs)
    orders = residency.order([], [(needs, 0.0), (MODELS["a"].needs, 0.0)], 0.0)
    assert orders == ModelOrders(load=(SEGMENTER,))
    assert (residency.may_start(needs), residency.may_start(MODELS["a"].needs)) == (False, True), "others go ahead"
    residency.note_loaded(0, LoadedComponent(SEGMENTER, 1))
    assert residency.is_complete
    assert residency.may_start(needs)
    residency.lose(0)
    residency.join(0, [LoadedComponent(key, 1) for key in MODELS["a"].needs])
    assert residency.order([], [], 0.0) == ModelOrders(load=(SEGMENTER,)), "a rank that is restarted gets it, too"


def test_a_failed_component_of_some_requests_leaves_the_others() -> None:
    residency = make("a", models={"a": MODELS["a"]})
    needs = (*MODELS["a"].needs, SEGMENTER)
    residency.note_wanted(needs)
    residency.order([], [(needs, 0.0)], 0.0)
    residency.note_failed(0, SEGMENTER, BROKEN, 1.0)
    assert residency.failure_of(needs, 1.0) == BROKEN
    assert residency.failure_of(MODELS["a"].needs, 1.0) is None
    assert residency.is_complete
    assert residency.states() == {"a": "loaded"}
    later = 1.0 + RETRY_SECONDS
    residency.note_wanted(needs)
    assert residency.order([], [(needs, later)], later) == ModelOrders(load=(SEGMENTER,))


def test_what_is_loaded_on_demand_makes_room_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, SEGMENTER, 3)
    residency = make("a", budget=14, models={name: MODELS[name] for name in ("a", "c")})
    residency.note_wanted((SEGMENTER,))
    orders = residency.order([], [((SEGMENTER,), 0.0)], 0.0)
    assert orders.load == (SEGMENTER,)
    answer(residency, orders)
    orders = order(residency, [], [("c", 0.0)], 0.0)
    assert orders.load == MODELS["c"].components
    assert SEGMENTER in orders.unload
    answer(residency, orders)
    assert order(residency, [], [], 0.0).load == (), "and is not loaded again where there is no room for it"
    assert not residency.has(ModelKeys("", "", (SEGMENTER,)), [0])


def test_whoever_has_all_it_needs_may_begin_behind_however_many_others() -> None:
    residency = make("a", models={name: MODELS[name] for name in ("a", "c")})
    needs = (SEGMENTER, *MODELS["a"].needs)
    residency.note_wanted(needs)
    residency.note_loaded(0, LoadedComponent(SEGMENTER, 1))
    others = [(MODELS["a"].needs, 0.0)] * MOST_LOOKED_AT
    residency.order([], [*others, (needs, 0.0)], 0.0)
    assert not residency.is_complete, "c is on its way"
    assert residency.may_start(needs)
    assert not residency.may_start((*needs, *MODELS["c"].needs))


def test_what_a_waiting_request_needs_is_loaded_again_after_it_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order was sent in a pass that looked at the request behind."""
    monkeypatch.setitem(SIZES, SEGMENTER, 3)
    residency = make("a", budget=17, models={name: MODELS[name] for name in ("a", "c")})
    needs = (*MODELS["a"].needs, SEGMENTER)
    residency.note_wanted(needs)
    residency.note_loaded(0, LoadedComponent(SEGMENTER, 3))
    orders = order(residency, [], [("c", 0.0)], 0.0)
    answer(residency, orders)
    assert not residency.has(ModelKeys("", "", needs), [0])
    orders = residency.order([], [(needs, 1.0)], 1.0)
    answer(residency, orders)
    assert residency.has(ModelKeys("", "", needs), [0])


def test_what_exceeds_the_budget_by_itself_is_refused_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model fits, and with its segmenter it does not."""
    monkeypatch.setitem(SIZES, SEGMENTER, 1)
    residency = make("a", budget=14, models={"a": MODELS["a"]})
    failure = residency.failure_of((*MODELS["a"].needs, SEGMENTER), 0.0)
    assert failure is not None
    assert "--model-bytes allows 14" in failure.message
    assert residency.failure_of(MODELS["a"].needs, 0.0) is None
    assert residency.failure_of((SEGMENTER,), 0.0) is None
