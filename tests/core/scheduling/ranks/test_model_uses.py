"""Which models each rank has, and how often requests have made their steps with them."""

from __future__ import annotations

import msgspec
from load_kit import BROKEN, MODELS, TEXT, VAE, Rig, transformer

from core.costs.load_report import RankModel
from core.graph.work import Work
from core.handles import NOWHERE
from core.messages.worker import Batch, Item, Load
from core.scheduling.ops.embed import Embed
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.model_uses import ModelUses
from core.scheduling.ranks.quarantine import Suspects


def rows(uses: ModelUses, rank: int = 0) -> dict[str, RankModel]:
    return {each.model: each for each in uses.on(rank)}


def step(
    rig: Rig,
    uses: ModelUses,
    *models: str,
    op: str = "denoise",
    version: int = 1,
    ranks: tuple[int, ...] = (0,),
    now: float,
) -> None:
    """A step of a request of each of these models is sent."""
    items = tuple(Item(str(index), op, name, Embed("", NOWHERE), (), version) for index, name in enumerate(models))
    keys = rig.bindings.keys(models[0], "transformer")
    uses.note_batch(Flight(Batch(0, op, ranks, items), keys, Work((), ()), is_step=True), now)


def test_a_hit_is_a_request_that_begins_its_steps_since_the_model_was_loaded() -> None:
    rig = Rig("a", ranks=2, set_size=1)
    uses = ModelUses(rig.residency)
    assert rows(uses) == {"a": RankModel("a", "resident", 0, 1, 14, 0.0)}
    step(rig, uses, "a", "a", now=5.0)
    step(rig, uses, "a", "a", version=2, now=6.0)
    step(rig, uses, "a", ranks=(0, 1), now=7.0)
    assert rows(uses) == {"a": RankModel("a", "resident", 3, 1, 14, 7.0)}
    assert rows(uses, 1)["a"].hits == 1
    assert uses.hits == {"a": 3}
    rig.residency.note_sent((0,), (), (transformer("a"),))
    assert not rows(uses), "text encoder and VAE alone make no step"
    rig.note_loaded(0, transformer("a"))
    assert rows(uses) == {"a": RankModel("a", "resident", 0, 2, 14, 7.0)}
    assert rows(uses, 1)["a"].hits == 1
    assert uses.loads() == {"a": 3, "b": 0, "c": 0}


def test_a_controlnet_that_serves_a_step_is_no_hit_of_its_own() -> None:
    rig = Rig("a")
    uses = ModelUses(rig.residency)
    step(rig, uses, "a", op="controlnet", now=1.0)
    step(rig, uses, "a", now=2.0)
    assert rows(uses)["a"].hits == uses.hits["a"] == 1


def test_models_are_told_in_the_order_in_which_they_are_served() -> None:
    """Whatever the order in which they were loaded, or that of a set."""
    rig = Rig("c", "b", "a")
    assert [*rows(ModelUses(rig.residency))] == ["a", "b", "c"]


def test_an_adapters_uses_are_its_models() -> None:
    rig = Rig("a", models=MODELS | {"shirt": msgspec.structs.replace(MODELS["a"], name="shirt", parent="a")})
    uses = ModelUses(rig.residency)
    step(rig, uses, "shirt", now=1.0)
    assert {name: each.hits for name, each in rows(uses).items()} == {"a": 1}


def test_what_a_rank_loads_or_could_not_load_is_told() -> None:
    rig = Rig("a", ranks=2, set_size=1)
    uses, residency = ModelUses(rig.residency), rig.residency
    residency.note_sent((0,), (transformer("b"),), ())
    assert {name: each.state for name, each in rows(uses).items()} == {"a": "resident", "b": "loading"}
    residency.note_failed(0, transformer("b"), BROKEN, 0.0)
    assert rows(uses)["b"] == RankModel("b", "quarantined", 0, 0, 4, 0.0)
    assert rows(uses, 1).keys() == {"a"}
    residency.note_sent((0,), (transformer("b"),), ())
    assert rows(uses)["b"].state == "loading", "it is tried again"
    rig.answer([Load((0,), (transformer("b"),))])
    assert rows(uses)["b"].state == "resident"


def test_a_model_whose_batches_end_ranks_is_quarantined_where_it_is() -> None:
    rig = Rig("a", "b")
    uses, keys = ModelUses(rig.residency), rig.bindings.keys("a", "transformer")
    for name in "xyz":
        rig.residency.quarantine.note_death(keys, Suspects(frozenset(name), frozenset(name)), BROKEN, 0.0)
    assert {name: each.state for name, each in rows(uses).items()} == {"a": "quarantined", "b": "resident"}


def test_a_dead_rank_has_nothing_and_its_hits_are_forgotten() -> None:
    rig = Rig("a")
    uses = ModelUses(rig.residency)
    step(rig, uses, "a", now=1.0)
    rig.residency.lose(0)
    assert not rows(uses)
    rig.join(0, "a")
    assert rows(uses)["a"].hits == 0


def test_models_that_share_what_makes_their_steps_are_told_apart_by_name() -> None:
    """Both are there at once, and are loaded together; a hit is of the one that was asked for."""
    rig = Rig("a", models=MODELS | {"twin": msgspec.structs.replace(MODELS["a"], name="twin")})
    uses = ModelUses(rig.residency)
    step(rig, uses, "twin", now=1.0)
    assert {name: (each.hits, each.loads, each.used) for name, each in rows(uses).items()} == {
        "a": (0, 1, 0.0),
        "twin": (1, 1, 1.0),
    }


def test_a_model_whose_steps_others_make_is_loaded_once_with_all_it_has() -> None:
    rig = Rig("d", models=MODELS | {"d": msgspec.structs.replace(MODELS["a"], name="d", components=(TEXT, VAE))})
    uses = ModelUses(rig.residency)
    assert rows(uses)["d"] == RankModel("d", "resident", 0, 1, 4, 0.0)
    assert uses.loads()["d"] == 1


def test_uses_and_states_are_told_anew_each_time() -> None:
    """Although the rows are kept as long as nothing that they tell of has changed."""
    rig = Rig("a", "b", ranks=2, set_size=1)
    uses, keys = ModelUses(rig.residency), rig.bindings.keys("b", "transformer")
    before = rows(uses)
    assert all(now is before[name] for name, now in rows(uses).items())
    step(rig, uses, "a", now=1.0)
    assert [(each.hits, each.used) for each in uses.on(0)] == [(1, 1.0), (0, 0.0)]
    assert [each.hits for each in uses.on(1)] == [0, 0]
    for name in "xyz":
        rig.residency.quarantine.note_death(keys, Suspects(frozenset(name), frozenset(name)), BROKEN, 0.0)
    assert [each.state for each in uses.on(0)] == ["resident", "quarantined"]
    rig.residency.quarantine.note_good_batch(keys, frozenset("xyz"), 1e6)
    assert [each.state for each in uses.on(0)] == ["resident", "resident"]
    assert [each.hits for each in uses.on(0)] == [1, 0]
