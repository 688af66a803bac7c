"""What is refused after which deaths and failed loads: to everybody, or to one owner, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.failure import Failure
from core.handles import ModelKey
from core.scheduling.ranks.quarantine import (
    FIRST_WAIT_SECONDS,
    GOOD_BATCHES,
    MAX_WAIT_SECONDS,
    MEMORY_SECONDS,
    Quarantine,
    Suspects,
)
from core.scheduling.requests.bindings import ModelKeys

KEYS, OTHER = (ModelKeys("f", "cpu", (ModelKey(name, "transformer"),)) for name in ("a", "b"))
VAE = ModelKey("a", "vae")
DIED = Failure("engine_dead", "worker 0 died (killed by signal 11)")
BROKEN = Failure("config", "cut short")


def suspects(*requests: str) -> Suspects:
    """Requests such as "A1", whose owner is "A". "_1": nobody knows whose it is."""
    return Suspects(frozenset(requests), frozenset(each[0].strip("_") for each in requests))


class Bench:
    """A quarantine and a clock."""

    def __init__(self) -> None:
        self.quarantine, self.now = Quarantine(), 0.0

    def die(self, *requests: str, keys: ModelKeys = KEYS) -> None:
        self.now += 1.0
        self.quarantine.note_death(keys, suspects(*requests), DIED, self.now)

    def work(self, number: int, *owners: str, keys: ModelKeys = KEYS) -> None:
        for _ in range(number):
            self.quarantine.note_good_batch(keys, set(owners), self.now)

    def refuses(self, owner: str, keys: ModelKeys = KEYS) -> bool:
        return self.quarantine.refusal_of((OTHER, keys), owner, self.now) is not None

    def wait(self) -> None:
        """Until nothing is refused."""
        self.now = max(each.until for each in self.quarantine.refusals)

    @property
    def seconds(self) -> list[float]:
        """How long each is refused."""
        return [each.until - each.since for each in self.quarantine.refusals]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ------------------------------------------------------------------------------------------------------ who is to blame


@given(st.lists(st.tuples(st.sets(st.sampled_from(["B1", "B2", "C1", "D1"]), max_size=3), st.integers(0, 20))))
def test_no_owner_can_have_a_model_refused_to_others(deaths: list[tuple[set[str], int]]) -> None:
    """Whatever requests of others are in the batches that end ranks."""
    bench = Bench()
    for number, (others, num_good) in enumerate(deaths):
        bench.die(f"A{number}", *others)
        assert not any(map(bench.refuses, "BCD"))
        bench.work(num_good, "B")


@given(st.lists(st.sampled_from("ABC"), min_size=1, max_size=5), st.integers(1, 3))
def test_a_model_whose_batches_always_end_ranks_is_refused_after_two_requests(owners: list[str], tries: int) -> None:
    """To all if their owners differ, else to the owner; and others' models never."""
    bench = Bench()
    run = []
    for number, owner in enumerate(owners):
        for _ in range(tries):
            if not bench.refuses(owner):
                bench.die(f"{owner}{number}")
                run.append(owner)
                assert len({*run}) == 1 or all(map(bench.refuses, "ABC"))
        assert bench.refuses(owner) is (number > 0)
        assert not bench.quarantine.refusal_of((OTHER,), owner, bench.now)
    assert len(run) <= tries + 2, "one owner's, and then all"


def test_one_request_has_nothing_refused(bench: Bench) -> None:
    for others in (("B1", "C1"), ("B1", "C1"), (), ()):
        bench.die("A1", *others)
    assert not any(map(bench.refuses, "ABC"))
    assert not list(bench.quarantine.refusals)


def test_two_requests_of_an_owner_have_the_model_refused_to_that_owner(bench: Bench) -> None:
    for name in ("A1", "A1", "A1", "A2"):
        bench.die(name)
    assert [bench.refuses(owner) for owner in "AB"] == [True, False]
    (refusal,) = bench.quarantine.refusals
    assert (refusal.cause, refusal.owner, refusal.failure, refusal.times) == ("owner_deaths", "A", DIED, 1)


def test_who_was_in_every_batch_is_not_blamed_until_a_batch_alone_tells(bench: Bench) -> None:
    bench.die("A1", "B1")
    bench.die("A2", "B2")
    assert not any(map(bench.refuses, "ABC")), "it may be either"
    bench.die("A2")
    assert not any(map(bench.refuses, "ABC"))
    bench.die("A1")
    assert [bench.refuses(owner) for owner in "ABC"] == [True, False, False]


def test_nothing_speaks_against_a_class_that_nobody_names_any_more(bench: Bench) -> None:
    for name in ("A1", "B1", "C1"):
        bench.die(name)
        bench.die(name, keys=OTHER)
    bench.quarantine.forget(KEYS.keys[0])
    assert [refusal.keys for refusal in bench.quarantine.refusals] == [OTHER.keys]


def test_rare_deaths_do_not_add_up(bench: Bench) -> None:
    for number in range(5):
        bench.die(f"{'ABCDE'[number]}1")
        bench.work(GOOD_BATCHES, "F")
    assert not any(map(bench.refuses, "ABCDEF"))
    bench.work(GOOD_BATCHES, *"ABCDE")
    assert not bench.quarantine._batches, "nothing is kept"


def test_an_owner_is_cleared_by_its_own_batches_alone(bench: Bench) -> None:
    bench.die("A1")
    bench.work(100, "B")
    bench.die("A2")
    assert bench.refuses("A")
    other = Bench()
    other.die("A1")
    other.work(GOOD_BATCHES, "A", "B")
    other.die("A2")
    assert not other.refuses("A")


def test_a_case_is_forgotten_in_time(bench: Bench) -> None:
    bench.die("A1")
    bench.now += MEMORY_SECONDS
    bench.die("B1")
    assert not any(map(bench.refuses, "AB"))


def test_stale_deaths_hide_no_refusal(bench: Bench) -> None:
    bench.die("A1")
    bench.now = MEMORY_SECONDS - 100.0
    bench.die("B1")
    assert bench.refuses("C")
    bench.now = MEMORY_SECONDS + 1.0  # the first is forgotten
    assert not bench.refuses("C")
    bench.die("C1")
    assert bench.refuses("D")


def test_two_requests_of_nobody_knows_whom_are_refused_to_everybody(bench: Bench) -> None:
    for _ in range(3):
        bench.die("_1")
    assert not bench.refuses("")
    bench.die("_2")
    (refusal,) = bench.quarantine.refusals
    assert (refusal.cause, refusal.owner, refusal.times) == ("deaths", None, 1)
    assert all(map(bench.refuses, ["", "A"]))
    bench.wait()
    bench.work(1, "")
    assert not list(bench.quarantine.refusals)


def test_rare_deaths_of_nobody_knows_whose_requests_do_not_add_up(bench: Bench) -> None:
    for number in range(5):
        bench.die(f"_{number}")
        bench.work(GOOD_BATCHES, "")
    assert not list(bench.quarantine.refusals)
    assert not bench.quarantine._batches, "nothing is kept"


# ------------------------------------------------------------------------------------------------------ for how long


def test_the_wait_doubles_with_every_further_request_up_to_a_bound(bench: Bench) -> None:
    bench.die("A1")
    bench.die("B1")
    waits = bench.seconds
    for number in range(8):
        bench.wait()
        assert not bench.refuses("A"), "it is tried again"
        bench.die(f"{'CDEFGHIJ'[number]}1")
        waits = [*waits, bench.seconds[0]]
    assert waits[:4] == [FIRST_WAIT_SECONDS * each for each in (1, 2, 4, 8)]
    assert waits[-1] == MAX_WAIT_SECONDS


def test_one_owner_cannot_keep_a_model_refused_to_others(bench: Bench) -> None:
    bench.die("A1")
    bench.die("B1")
    assert bench.refuses("C")
    bench.wait()
    for number in range(2, 9):
        bench.die(f"A{number}")
    assert [bench.refuses(owner) for owner in "ABC"] == [True, False, False]


def test_several_deaths_of_one_try_count_once(bench: Bench) -> None:
    for name in ("A1", "B1", "C1", "D1"):
        bench.die(name)
    assert bench.seconds[0] == FIRST_WAIT_SECONDS


def test_a_good_batch_ends_it_once_the_wait_is_over(bench: Bench) -> None:
    bench.die("A1")
    bench.die("B1")
    bench.work(1, "C")
    assert list(bench.quarantine.refusals), "it was sent before"
    bench.wait()
    assert list(bench.quarantine.refusals), "it was not tried yet"
    bench.work(1, "C", keys=OTHER)
    assert list(bench.quarantine.refusals)
    bench.work(1, "C")
    assert not list(bench.quarantine.refusals)
    bench.die("C1")
    assert bench.seconds == [2 * FIRST_WAIT_SECONDS], "once is no proof"


# ------------------------------------------------------------------------------------------------------ loads


def test_a_component_that_could_not_be_loaded_is_refused_for_longer_each_time(bench: Bench) -> None:
    quarantine, waits = bench.quarantine, []
    for place in (0, 1, 0, 1):
        refusal = quarantine.note_failed_load(place, VAE, BROKEN, bench.now)
        assert quarantine.note_failed_load(place, VAE, BROKEN, bench.now + 0.1) == refusal, "of one try"
        for at in (0, 1, 2, None):
            assert quarantine.refusal_of_loads([VAE], at, bench.now + 1.0) == refusal
        assert quarantine.refusal_of_loads([KEYS.keys[0]], place, bench.now + 1.0) is None
        bench.wait()
        assert quarantine.refusal_of_loads([VAE], place, bench.now) is None, "it is tried again"
        assert quarantine.has_failed_to_load([VAE])
        waits.append(refusal.until - refusal.since)
    assert waits == [FIRST_WAIT_SECONDS * each for each in (1, 2, 4, 8)]


def test_a_load_anywhere_ends_a_refusal_but_where_it_keeps_failing_it_is_tried_rarely(bench: Bench) -> None:
    """A component that does not fit the device of place 0, and that of place 1."""
    quarantine, waits = bench.quarantine, []
    for _ in range(8):
        refusal = quarantine.note_failed_load(0, VAE, BROKEN, bench.now)
        assert refusal.until - bench.now == FIRST_WAIT_SECONDS, "it was loaded since the last time"
        quarantine.note_loaded(1, VAE)
        assert not quarantine.has_failed_to_load([VAE])
        assert not list(quarantine.refusals)
        assert [quarantine.has_failed_at(place, [VAE]) for place in (0, 1)] == [True, False]
        assert quarantine.refusal_of_loads([VAE], 1, bench.now) is None
        here = quarantine.refusal_of_loads([VAE], 0, bench.now)
        assert here is not None
        waits.append(here.until - bench.now)
        bench.now = here.until
        assert quarantine.refusal_of_loads([VAE], 0, bench.now) is None
    assert waits[:3] == [FIRST_WAIT_SECONDS * each for each in (1, 2, 4)]
    assert waits[-1] == MAX_WAIT_SECONDS
    quarantine.note_loaded(0, VAE)
    assert not quarantine.has_failed_at(0)


def test_a_death_in_a_load_alone_is_a_failed_load(bench: Bench) -> None:
    assert bench.quarantine.note_death_in_load(0, VAE, Suspects(), DIED, 1.0)
    refusal = bench.quarantine.refusal_of_loads([VAE], 1, 2.0)
    assert refusal is not None
    assert (refusal.cause, refusal.owner, refusal.failure) == ("load", None, DIED)


def test_an_owner_whose_requests_end_ranks_has_nothing_refused_that_loads_meanwhile(bench: Bench) -> None:
    for number in range(5):
        bench.quarantine.note_death_in_load(0, VAE, suspects(f"A{number}", "B1"), DIED, float(number))
    assert bench.quarantine.refusal_of_loads([VAE], 0, 5.0) is None
    assert bench.quarantine.has_failed_to_load([VAE]), "but it is loaded for requests alone from now on"
    assert bench.quarantine.note_death_in_load(0, VAE, suspects("C1"), DIED, 6.0)


def test_two_deaths_in_loads_beside_requests_of_nobody_knows_whom_are_failed_loads(bench: Bench) -> None:
    assert not bench.quarantine.note_death_in_load(0, VAE, suspects("_1"), DIED, 1.0)
    assert bench.quarantine.note_death_in_load(0, VAE, suspects("_2"), DIED, 2.0)
