"""Quarantine: which components are refused for a while, because they could not be loaded or their batches ended ranks.

A component that could not be loaded, or that ended a rank that ran nothing while it was loaded, is refused to everybody
at once, until it is loaded anywhere. Where its load has failed, it is not loaded again before a wait of that place is
over, which a load elsewhere does not end: the rank's device may be too small.

A batch that ends a rank soon after its start has *suspects*: its requests. Deaths with a request in common are one
*case*, as that request may be their only cause. An owner may be the cause of a case if each of its deaths had a request
of that owner. The components of such batches are refused

- to everybody, when some case is left whichever owner's are left out, so that no owner can cause this for the others;
- to one owner, when nobody else may be the cause of two cases.

Requests of owner "" may come from anybody. Two cases of such requests alone are refused to everybody, although one
client may have sent both: a rank that has died five times in a row is given up, and three bad requests are enough for
that. A model that is away for some seconds is the smaller loss.

Every further case doubles the wait. A case is forgotten after some good batches of the same components, so that rare
deaths of other causes do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain

from core.back_off import doubled
from core.costs.load_report import QuarantineCause
from core.failure import Failure
from core.handles import ModelKey
from core.scheduling.requests.bindings import ModelKeys, Needs

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 10.0, 640.0
"""Time for which components are refused at first, doubled each further time, and its upper bound."""

GOOD_BATCHES = 16
"""A case speaks against no model after this many good batches, and against no owner after as many with one of its
requests."""

MEMORY_SECONDS = 2 * MAX_WAIT_SECONDS
"""Time after the last death of a case at which it is forgotten whatever has run since."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """What may have ended a rank."""

    # Ids. For a job of the cache: its own, and those of the requests that wait for it, which may have work elsewhere.
    requests: frozenset[str] = frozenset()
    # Whose these requests are, see EngineRequest; "": nobody knows.
    owners: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Components that are refused. Times are monotonic seconds."""

    keys: tuple[ModelKey, ...]  # what computes with all of these together is refused
    cause: QuarantineCause
    owner: str | None  # whose requests are refused; None: everybody's
    failure: Failure  # of the last load, or why the last rank died
    times: int  # number of this refusal, from 1
    since: float
    until: float

    def is_of(self, needs: Iterable[ModelKeys], owner: str | None) -> bool:
        """Whether requests of this owner with these needs are refused. owner: None: those of all owners."""
        return self.owner in (None, owner) and any(set(self.keys).issubset(each.keys) for each in needs)


class Quarantine:
    """One per scheduler. now: monotonic seconds. place: number of a set of ranks that loads as one."""

    def __init__(self) -> None:
        # Of failed loads. Component -> what is known since it was last loaded anywhere.
        self._loads: dict[ModelKey, _Record] = {}
        # (place, component) -> what is known since it was last loaded there.
        self._loads_at: dict[tuple[int, ModelKey], _Record] = {}
        self._batches: dict[tuple[ModelKey, ...], _Record] = {}  # components of a batch -> what is known of its deaths

    # ------------------------------------------------------------------------------------------------- notes

    def note_failed_load(self, place: int, key: ModelKey, failure: Failure, now: float) -> Refusal:
        """Note that a rank of this place could not load a component, which is refused from now on."""
        here, everywhere = self._records(place, key)
        here.refuse("load", None, failure, now)
        return everywhere.refuse("load", None, failure, now)

    def note_loaded(self, place: int, key: ModelKey) -> None:
        """Note that all ranks of this place have a component."""
        self._loads.pop(key, None)
        self._loads_at.pop((place, key), None)

    def forget(self, key: ModelKey) -> None:
        """Forget the failed loads of a component that nobody names any more, and the deaths of its batches."""
        self._loads.pop(key, None)
        for keys in [keys for keys in self._batches if key in keys]:
            del self._batches[keys]
        for place in [place for place in self._loads_at if place[1] == key]:
            del self._loads_at[place]

    def note_death_in_load(
        self, place: int, key: ModelKey, suspects: Suspects, failure: Failure, now: float
    ) -> Refusal | None:
        """Note that a rank of this place has died while it loaded a component; the refusal to everybody that follows.
        suspects: of what it ran beside the load; none: the load alone is the cause.
        """
        here, everywhere = self._records(place, key)
        if None in here.add(suspects, now):
            here.refuse("load", None, failure, now)
        return everywhere.refuse("load", None, failure, now) if None in everywhere.add(suspects, now) else None

    def _records(self, place: int, key: ModelKey) -> tuple[_Record, _Record]:
        """What is known of a component's failed loads at a place, and anywhere."""
        here = self._loads_at.setdefault((place, key), _Record((key,)))
        return here, self._loads.setdefault(key, _Record((key,)))

    def note_death(self, keys: ModelKeys, suspects: Suspects, failure: Failure, now: float) -> list[Refusal]:
        """Note that a rank has died soon after its start, in a batch with these components; what is refused then."""
        record = self._batches.setdefault(keys.keys, _Record(keys.keys))
        owners = record.add(suspects, now)
        return [record.refuse("deaths" if owner is None else "owner_deaths", owner, failure, now) for owner in owners]

    @property
    def awaits_batches(self) -> bool:
        """Whether good batches of any components matter."""
        return bool(self._batches)

    def note_good_batch(self, keys: ModelKeys, owners: Set[str], now: float) -> None:
        """Note that a batch with these components has succeeded. owners: those of its requests."""
        record = self._batches.get(keys.keys)
        if record is not None:
            record.note_good(owners, now)
            if not record.cases:
                del self._batches[keys.keys]

    # ------------------------------------------------------------------------------------------------- what is refused

    def refusal_of_loads(self, keys: Iterable[ModelKey], place: int | None, now: float) -> Refusal | None:
        """Why some of these components are not loaded at a place now; None: they may be, or it is time to try again.
        place: None: why they are not loaded anywhere.
        """
        if not self._loads and not self._loads_at:  # most of the time
            return None
        found = (each for key in keys for record in self._known(key, place) for each in record.in_force)
        return max((each for each in found if now < each.until), key=lambda each: each.until, default=None)

    def _known(self, key: ModelKey, place: int | None) -> Iterator[_Record]:
        if (record := self._loads.get(key)) is not None:
            yield record
        if place is not None and (record := self._loads_at.get((place, key))) is not None:
            yield record

    def refuses_loads(self, now: float) -> bool:
        """Whether anything is not loaded now, anywhere or at a place."""
        records = chain(self._loads.values(), self._loads_at.values())
        return any(now < each.until for record in records for each in record.in_force)

    def refusal_of(self, needs: Needs, owner: str, now: float) -> Refusal | None:
        """Why an owner's requests with these needs do not run now; None: they may, or it is time to try again."""
        found = (each for record in self._batches.values() for each in record.in_force)
        return next((each for each in found if now < each.until and each.is_of(needs, owner)), None)

    def has_failed_to_load(self, keys: Iterable[ModelKey]) -> bool:
        """Whether a load of any of these components has failed, or may have ended its rank, since it was last loaded
        anywhere.
        """
        return bool(self._loads) and any(key in self._loads for key in keys)

    def has_failed_at(self, place: int, keys: Iterable[ModelKey] | None = None) -> bool:
        """As `has_failed_to_load`, but at this place, since it was last loaded there. keys: None: any component."""
        failed = self.failed_at(place)
        return bool(failed) if keys is None else not failed.isdisjoint(keys)

    def failed_at(self, place: int) -> set[ModelKey]:
        """The components of which this place has a failed load, see `has_failed_at`."""
        return {key for at, key in self._loads_at if at == place}

    @property
    def refusals(self) -> Iterator[Refusal]:
        """Those in force, or over without a good load or batch since then. Those of one place are not among them."""
        for record in (*self._loads.values(), *self._batches.values()):
            yield from record.in_force


@dataclass(slots=True)
class _Case:
    """Deaths with a request in common."""

    requests: frozenset[str]  # ids of those that were in all of them
    owners: frozenset[str]  # those with a request in each of them
    last: float  # time of the last death
    num_good: int = 0  # good batches since then
    num_own: int = 0  # of these, batches with a request of one of the owners

    @property
    def speaks_against_all(self) -> bool:
        return self.num_good < GOOD_BATCHES

    def speaks_against(self, owner: str) -> bool:
        return self.owners == {owner} and self.num_own < GOOD_BATCHES

    def is_forgotten(self, now: float) -> bool:
        has_sole_owner = len(self.owners) == 1
        is_refuted = not self.speaks_against_all and (not has_sole_owner or self.num_own >= GOOD_BATCHES)
        return is_refuted or now - self.last > MEMORY_SECONDS


@dataclass(slots=True)
class _Record:
    """What is known against some components."""

    keys: tuple[ModelKey, ...]
    cases: list[_Case] = field(default_factory=list)
    _last: dict[str | None, Refusal] = field(default_factory=dict)  # owner, None: everybody -> the last refusal
    _in_force: set[str | None] = field(default_factory=set)  # keys of `_last`

    @property
    def in_force(self) -> Iterator[Refusal]:
        """See `Quarantine.refusals`."""
        return (each for owner, each in self._last.items() if owner in self._in_force)

    def add(self, suspects: Suspects, now: float) -> list[str | None]:
        """Note a death. Returns to whom its components are to be refused because of it: owners; None: everybody."""
        self.cases = [case for case in self.cases if not case.is_forgotten(now)]
        scopes: list[str | None] = [None, *sorted(suspects.owners - {""})]
        before = [self._evidence(owner) for owner in scopes]
        self._add_to_cases(suspects, now)
        return [owner for owner, old in zip(scopes, before, strict=True) if self._evidence(owner) > old]

    def _add_to_cases(self, suspects: Suspects, now: float) -> None:
        for case in self.cases:
            if common := case.requests & suspects.requests:
                case.requests, case.owners = common, case.owners & suspects.owners
                case.last, case.num_good, case.num_own = now, 0, 0
                return
        self.cases.append(_Case(suspects.requests, suspects.owners, now))

    def _evidence(self, owner: str | None) -> int:
        """Number of cases that speak for a refusal to an owner; None: to everybody; at least 0."""
        if owner is not None:
            return max(0, sum(case.speaks_against(owner) for case in self.cases) - 1)
        cases = [case.owners for case in self.cases if case.speaks_against_all]
        owners: frozenset[str] = frozenset().union(*cases)
        of_others = min((sum(each not in of for of in cases) for each in owners), default=len(cases))
        return max(of_others, self._evidence(""))  # "": it may be anybody

    def refuse(self, cause: QuarantineCause, owner: str | None, failure: Failure, now: float) -> Refusal:
        """Refuse them. What several ranks tell of one try counts once."""
        last = self._last.get(owner)
        self._in_force.add(owner)
        if last is not None and now < last.until:
            return last
        times = 1 if last is None else last.times + 1
        until = now + doubled(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, times)
        self._last[owner] = Refusal(self.keys, cause, owner, failure, times, now, until)
        return self._last[owner]

    def note_good(self, owners: Set[str], now: float) -> None:
        """Note a good batch with requests of these owners."""
        for case in self.cases:
            case.num_good += 1
            case.num_own += not case.owners.isdisjoint(owners)
        self.cases = [case for case in self.cases if not case.is_forgotten(now)]
        self._in_force -= {each.owner for each in self.in_force if each.until <= now and each.owner in (None, *owners)}
