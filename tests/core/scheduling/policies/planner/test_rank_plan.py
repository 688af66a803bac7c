"""Plans of ranks: disjoint sets of buddies, for the most urgent requests first, that nobody else is computing on."""

from __future__ import annotations

from collections import Counter
from random import Random

from fakes import MODEL
from hypothesis import given
from hypothesis import strategies as st

from core.config import SchedulerConfig
from core.failure import Failure
from core.scheduling.policies.buddies import Buddies
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.planner.rank_plan import Contender, degrees, moves, plan
from core.scheduling.policies.planner.rank_sets import MOST_OF_RANK, RankSets
from core.scheduling.scheduler import StepScheduler

SPEEDS = {1: 1.0, 2: 1.9, 4: 3.5, 8: 5.0}


def contender(
    name: str,
    steps: int = 10,
    first: int = 1,
    held: tuple[int, ...] = (),
    *,
    is_running: bool = False,
    able: tuple[int, ...] = (),
) -> Contender:
    seconds = {degree: 1.0 / speed for degree, speed in SPEEDS.items()}
    return Contender(name, steps, seconds, 1.0, first, held, is_running, able=able)


def ending(name: str, rank: int) -> Contender:
    return Contender(name, 0, {1: 1.0}, 0.0, 1, (rank,), is_running=True, is_ending=True)


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Contender], list[int]]:
    """Requests, of which some hold ranks, some have models that a few ranks have; and the ranks that may be used."""
    num_ranks = draw(st.integers(1, 16))
    usable = sorted(draw(st.sets(st.sampled_from(range(num_ranks)), min_size=1)))
    few = sorted(draw(st.sets(st.sampled_from(usable), min_size=1))) if draw(st.booleans()) else usable
    buddies, contenders = Buddies(range(num_ranks)), list[Contender]()
    for index in range(draw(st.integers(0, 20))):
        held = buddies.take(draw(st.sampled_from([1, 2, 4]))) if draw(st.booleans()) else None
        is_running = held is not None and draw(st.booleans())
        if is_running and held is not None and len(held) == 1 and draw(st.booleans()):
            contenders.append(ending(str(index), held[0]))
            continue
        steps, first = draw(st.integers(0, 30)), draw(st.sampled_from([1, 2, 4]))
        is_of_few = few != usable and set(held or ()) <= set(few) and draw(st.booleans())
        able = tuple(few) if is_of_few else ()
        contenders.append(
            contender(str(index), steps, first if steps else 1, held or (), is_running=is_running, able=able)
        )
    return contenders, usable


@given(states())
def test_ranks_are_added_where_they_save_most_first_ones_first(state: tuple[list[Contender], list[int]]) -> None:
    """As the rule says: the best of all, found anew for each doubling. Only some may use the last ranks."""
    contenders, ranks = state
    found = degrees(contenders, ranks)
    given = dict.fromkeys(found, 0)
    num_of = {True: len(ranks), False: 0}  # ranks that those of the few may have -> free ones
    few = next((each.able for each in contenders if each.able), ())
    if few:
        num_of = {True: len({*few} & {*ranks}), False: len({*ranks} - {*few})}

    def number(each: Contender) -> int:
        return num_of[True] + (0 if each.able else num_of[False])

    def take(each: Contender, size: int) -> None:
        others = 0 if each.able else min(size, num_of[False])
        num_of[False] -= others
        num_of[True] -= size - others

    for each in contenders[: len(found)]:
        free = number(each)
        given[each.name] = min(each.first, 1 << free.bit_length() - 1) if free else 0
        take(each, given[each.name])

    def gain(each: Contender) -> float:
        degree = given[each.name]
        before, after = each.seconds(degree), each.seconds(2 * degree)
        if before is None or after is None or degree > number(each) or after > 0.9 * before:
            return 0.0
        return (before - after) / degree

    while given and gain(best := max(contenders[: len(given)], key=gain)) > 0:
        take(best, given[best.name])
        given[best.name] *= 2
    assert given == found


@given(states())
def test_plans_are_disjoint_sets_of_buddies_for_the_first_requests(state: tuple[list[Contender], list[int]]) -> None:
    contenders, ranks = state
    places = plan(contenders, ranks, RankSets())
    used = [rank for place in places.values() for rank in place]
    assert len(used) == len(set(used))
    assert set(used) <= set(ranks)
    of_name = {each.name: each for each in contenders}
    for name, place in places.items():
        assert place in list(Buddies(ranks).sets(len(place), of_name[name].able))
    assert all(places[each.name] == each.held for each in contenders if each.is_ending and each.held[0] in ranks)
    waiting = [each for each in contenders if not each.is_ending and each.name not in places]
    for each in waiting:
        assert set(used) >= set(each.able or ranks), "no rank is idle while a request waits for one"
        first, later = contenders[: contenders.index(each)], contenders[contenders.index(each) + 1 :]
        before = {rank for other in first for rank in places.get(other.name, ())}
        alike = [other.name for other in later if other.able == each.able and not other.is_ending]
        assert places.keys().isdisjoint(alike) or before >= set(each.able or ranks), "nobody is passed over"


@given(states())
def test_moves_leave_alone_what_runs(state: tuple[list[Contender], list[int]]) -> None:
    contenders, ranks = state
    now = moves(contenders, plan(contenders, ranks, RankSets()), ranks, RankSets())
    running = {rank for each in contenders if each.is_running for rank in each.held}
    used = [rank for place in now.values() for rank in place]
    assert len(used) == len(set(used))
    assert set(used) <= set(ranks) - running
    assert all(set(now[each.name]) <= set(each.able or ranks) for each in contenders if each.name in now)
    assert not {each.name for each in contenders if each.is_running} & set(now)


def test_ranks_that_nobody_wants_go_to_those_that_save_most() -> None:
    assert list(degrees([contender("long", 30), contender("short", 3)], range(3)).values()) == [2, 1]
    assert list(degrees([contender("alone", 30)], range(8)).values()) == [8]
    assert list(degrees([contender(str(index)) for index in range(9)], range(8)).values()) == [1] * 8
    assert list(degrees([contender("a", first=2), contender("b", first=2), contender("c")], range(4)).values()) == [
        2,
        2,
    ]


def test_nobody_is_passed_over_where_a_large_set_takes_ranks_of_few() -> None:
    few = (0, 1, 4)
    line = [contender("large"), contender("first", 0, able=few), contender("second", able=few)]
    places = plan(line, range(7), RankSets())
    assert "first" in places


def test_a_request_stays_where_its_state_is_and_shrinks_to_its_first_ranks() -> None:
    held = contender("a", held=(4, 5, 6, 7))
    assert plan([held], range(8), RankSets()) == {"a": tuple(range(8))}
    others = [contender(str(index)) for index in range(7)]
    assert plan([held, *others], range(8), RankSets())["a"] == (4,)
    assert plan([contender("a", held=(2,)), contender("b", held=(4, 5))], range(8), RankSets())["b"] == (4, 5, 6, 7)


def test_a_request_waits_for_ranks_on_which_another_one_still_runs() -> None:
    grows, leaves = contender("grows", first=2, held=(0,)), contender("leaves", held=(1,), is_running=True)
    assert moves([grows, leaves], {"grows": (0, 1)}, range(2), RankSets()) == {"grows": (0,)}
    assert moves([grows], {"grows": (0, 1)}, range(2), RankSets()) == {"grows": (0, 1)}


def test_a_request_that_is_due_asks_for_the_ranks_that_it_needs() -> None:
    """Ten steps of 1 s, and 1 s besides."""
    assert [contender("a").degree_within(limit) for limit in (11.0, 10.0, 5.0, 3.0, 2.0)] == [1, 2, 4, 8, 1]
    assert contender("a", steps=0).degree_within(0.5) == 1


def test_ranks_that_only_some_have_a_model_for_are_shared_among_those() -> None:
    """Two models, each on every second rank: three requests of one leave its own ranks to the other."""
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    a, b, c = (contender(name, able=even) for name in "abc")
    assert plan([a, b], range(8), RankSets()) == {"a": (0, 2), "b": (4, 6)}
    other = contender("other", able=odd)
    assert list(degrees([a, b, c, other], range(8)).values()) == [2, 1, 1, 4]
    assert plan([a, b, c, other], range(8), RankSets())["other"] == odd
    anywhere = contender("anywhere")
    assert list(degrees([anywhere, contender("one", able=(0,))], range(2)).values()) == [1, 1]
    assert plan([anywhere, contender("one", able=(0,))], range(2), RankSets()) == {"anywhere": (1,), "one": (0,)}
    assert plan([a, contender("late", able=(0,)), other], (0, 1), RankSets()) == {"a": (0,), "other": (1,)}


def test_models_that_move_form_a_bounded_number_of_sets() -> None:
    """Each keeps a process group. Requests whose ranks form no further one have fewer ranks."""
    sets, random, used = RankSets(), Random(0), set[tuple[int, ...]]()
    for _ in range(500):
        able = tuple(sorted(random.sample(range(16), 4)))
        (ranks,) = plan([contender("a", 30, able=able)], range(16), sets).values()
        assert set(ranks) <= set(able)
        sets.note(ranks)
        used.add(ranks)
    of_rank = Counter(rank for ranks in used if len(ranks) > 1 for rank in ranks)
    assert max(of_rank.values()) <= MOST_OF_RANK + 4, "of buddies there are 2, 4, 8 and 16"
    assert {len(ranks) for ranks in used} == {1, 2, 4}
    assert plan([contender("a", 30)], range(16), sets) == {"a": tuple(range(8))}, "as if all of them had it"
    known = next(ranks for ranks in used if len(ranks) == 4)
    assert plan([contender("a", 30, able=known)], range(16), sets) == {"a": known}


def test_a_rank_that_is_restarted_has_no_sets_and_those_beside_it_keep_theirs() -> None:
    policy = Default()
    scheduler, sets = StepScheduler(SchedulerConfig(), {"m": MODEL}, 16, policy=policy), policy._groups._sets
    for other in range(2, 2 + MOST_OF_RANK):
        sets.note((0, other))
        sets.note((1, other + 1))
    assert not sets.allow((0, 15))
    scheduler.lose_rank(0, Failure("engine_dead", "it died"))
    scheduler.schedule(0.0)
    assert sets.allow((0, 15))
    assert not sets.allow((1, 15))
    sets.note((0, 15))
    assert sets.allow((0, 2)), "the other one has room for that"
