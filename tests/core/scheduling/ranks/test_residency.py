"""What ranks have, as it is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from load_kit import BROKEN, MODELS, VAE, Rig, model, transformer

from core.handles import LoadedComponent

FIVE = {name: model(name) for name in "abcde"}


def test_what_is_lacking_is_predicted() -> None:
    rig = Rig("a", seconds=0.5)
    assert [rig.residency.seconds_left(rig.needs(name)) for name in MODELS] == [0.0, 0.5, 1.0]


def test_a_copy_on_one_rank_is_enough_where_ranks_load_apart() -> None:
    for set_size, seconds in ((1, 0.0), (2, 0.5)):
        rig = Rig(ranks=2, set_size=set_size, models=FIVE, seconds=0.5)
        rig.note_loaded(1, transformer("a"))
        assert rig.residency.seconds_left(rig.needs("a")) == seconds
        assert rig.residency.states()["a"] == ("loaded" if set_size == 1 else "unloaded")
        assert rig.residency.homes(rig.needs("a")[0]).ranks == (1,)


def test_states() -> None:
    rig = Rig("a", ranks=2, models=MODELS)
    rig.order([], [("c", 0.0)])
    assert rig.residency.states() == {"a": "loaded", "b": "unloaded", "c": "loading"}
    rig.residency.note_failed(0, transformer("c"), BROKEN, 0.0)
    rig.note_loaded(0, *MODELS["c"].components[:1])
    assert rig.residency.states()["c"] == "loading", "the other rank has not answered"
    rig.note_loaded(1, *MODELS["c"].components)
    assert rig.residency.states()["c"] == "failed"


def test_a_dead_rank_has_nothing_and_is_awaited_for_nothing() -> None:
    rig = Rig("a", ranks=2, set_size=1, models=FIVE)
    rig.order([], [("b", 0.0)])
    rig.residency.lose(0)
    rig.residency.note_loaded(0, LoadedComponent(transformer("b"), 10))
    assert rig.residency.sets == ((1,),)
    assert rig.residency.homes(rig.needs("b")[0]).ranks == ()
    assert not rig.residency.is_loading((0,))
    assert rig.residency.homes(rig.needs("a")[0]).whole == ((1,),)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from("sldjf")), max_size=30))
def test_what_is_kept_agrees_with_what_was_told(events: list[tuple[int, str, str]]) -> None:
    """Whatever is sent, loaded, dropped, failed, lost and joined again."""
    models = {name: model(name, VAE) for name in "abc"}
    rig = Rig(ranks=3, set_size=1, models=models)
    has: list[set[str] | None] = [set(), set(), set()]
    loading: list[set[str]] = [set(), set(), set()]
    loaded: list[tuple[int, str]] = []  # (rank, model), in the order of the loads
    for rank, name, event in events:
        key, mine = transformer(name), has[rank]
        if event == "j" and mine is None:
            rig.join(rank)
            has[rank], loading[rank] = set(), set()
        elif mine is None:
            continue
        elif event == "s" and name not in mine | loading[rank]:
            rig.residency.note_sent((rank,), (key,), ())
            loading[rank].add(name)
        elif event == "l" and name in loading[rank]:
            rig.note_loaded(rank, key)
            loading[rank].remove(name)
            mine.add(name)
            loaded = [each for each in loaded if each != (rank, name)] + [(rank, name)]
        elif event == "f" and name in loading[rank]:
            rig.residency.note_failed(rank, key, BROKEN, 0.0)
            loading[rank].remove(name)
        elif event == "d" and name in mine:
            if len(mine) % 2:
                rig.residency.note_sent((rank,), (), (key,))
                mine.remove(name)
            else:
                rig.residency.lose(rank)
                has[rank], loading[rank] = None, set()
        for other in models:
            keys, up = rig.bindings.keys(other, "transformer"), [one for one in range(3) if has[one] is not None]
            holders = [one for one, its in loaded if its == other and other in (has[one] or ())]
            homes = rig.residency.homes(keys)
            assert homes.ranks == tuple(holders)
            assert homes.whole == tuple((one,) for one in holders)
            assert homes.coming == tuple((one,) for one in up if one not in holders and other in loading[one])
            copies = [one for one in up if other in (has[one] or set()) | loading[one]]
            for one in up:
                assert rig.residency.has_copy(transformer(other), (one,)) == bool({*copies} - {one})
                assert (transformer(other) in rig.residency.present((one,))) == (one in copies)
