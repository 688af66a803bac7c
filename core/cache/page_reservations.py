"""PageReservations: reserves cached pages for edits, and runs the jobs that prime missing ones.

It translates noise levels of steps into entries of the ActivationCacheManager. A reservation pins all entries that an
edit needs, or none, so that edits waiting for room hold nothing that others wait for. Edits that need the same
template's pages share one priming job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import get_args

from core.cache.activation_cache_manager import ActivationCacheManager
from core.cache.entry import EntryState
from core.cache.priming import Chunk, PrimingJob, TemplateInfo
from core.cache.reservation import Reservation
from core.handles import ArrayRef, EntryRef, Tier
from core.messages.engine import DropTemplate
from core.messages.worker import PageCopied, PageSpan
from core.model_info import ModelInfo
from core.page_scheme import page_key, template_of

TemplateLoadWins = Callable[[TemplateInfo, Tier, int], bool]
"""(template, tier, bytes) -> whether copying an entry up from that tier is predicted to be faster than priming it."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """The keyframes around a noise level: its pages are (1 - weight) * near + weight * far."""

    near: float  # noise level of the keyframe at or above
    far: float | None  # of the keyframe below; None: `near` alone
    weight: float

    @property
    def keyframes(self) -> tuple[float, ...]:
        """One or two noise levels, falling."""
        return (self.near,) if self.far is None else (self.near, self.far)


@lru_cache(maxsize=4096)  # requests with the same number of steps have the same noise levels
def bracket(keyframes: tuple[float, ...], sigma: float) -> Bracket:
    """The keyframes from which the pages at noise level `sigma` are interpolated; beyond the first or last keyframe,
    the nearest one. keyframes: falling; () = every noise level is a keyframe.
    """
    if not keyframes:
        return Bracket(sigma, None, 0.0)
    after = bisect_left(keyframes, -sigma, key=lambda keyframe: -keyframe)  # the first keyframe <= sigma
    if after == len(keyframes):
        return Bracket(keyframes[-1], None, 0.0)
    if after == 0 or keyframes[after] == sigma:
        return Bracket(keyframes[after], None, 0.0)
    near, far = keyframes[after - 1], keyframes[after]
    return Bracket(near, far, (near - sigma) / (near - far))


def keyframes_needed(keyframes: tuple[float, ...], sigmas: Iterable[float]) -> tuple[float, ...]:
    """All keyframes that steps at these noise levels read, falling."""
    needed: set[float] = set()
    for sigma in sigmas:
        needed |= set(bracket(keyframes, sigma).keyframes)
    return tuple(sorted(needed, reverse=True))


def _entries_at(reservation: Reservation, sigma: float) -> tuple[tuple[str, ...], float]:
    """Keys of the one or two entries at a noise level, and the weight of the second; looked up at every step."""
    known = reservation.entries_at.get(sigma)
    if known is None:
        around = bracket(reservation.template.scheme.keyframes, sigma)
        keys = tuple(page_key(reservation.template.key, keyframe) for keyframe in around.keyframes)
        known = reservation.entries_at[sigma] = keys, around.weight
    return known


def _slowest(tiers: Iterable[Tier | None]) -> Tier | None:
    found = set(tiers)
    return next((tier for tier in reversed(get_args(Tier)) if tier in found), None)


@dataclass(slots=True)
class PageReservations:
    """One per scheduler; owns the cache manager, the reservations and the priming jobs."""

    cache: ActivationCacheManager
    load_wins: TemplateLoadWins
    has_ranks: bool = False  # there are several: the one that decodes reads clean latents, too
    _reservations: dict[str, Reservation] = field(default_factory=dict)  # owner id -> its reservation, while reserved
    _jobs: dict[str, PrimingJob] = field(default_factory=dict)  # template key -> its job
    # job id -> reservations released while it was in flight, with the keys of entries that are still pinned for them
    _left: dict[str, list[tuple[Reservation, list[str]]]] = field(default_factory=dict)
    _freed: list[str] = field(default_factory=list)  # ids of jobs that have ended
    _job_ids: Iterator[int] = field(default_factory=count)
    num_chunks: int = 0  # since start

    # ------------------------------------------------------------------------------------------------- reservations

    def reserve(self, reservation: Reservation, rank: int = 0) -> bool:
        """Pin all entries of the reservation, or none; missing ones are loaded or primed. False: no room yet. rank:
        where the template's pages go unless they are on another rank's device.
        """
        template, wants = reservation.template, reservation.wants(shares_latents=self.has_ranks)
        was = {want.key: self.cache.state(want.key) for want in wants}
        home = self.cache.home(template.key, rank)
        if not self.cache.reserve(wants, lambda tier, nbytes: self.load_wins(template, tier, nbytes), home):
            return False
        reservation.is_reserved = True
        self._reservations[reservation.owner_id] = reservation
        reservation.is_primed = any(was[key] is EntryState.EMPTY for key in was)  # by an earlier edit's job
        tiers = {want.key: self.cache.tier_of(want.key) for want in wants}
        shared = {want.key for want in wants if want.is_shared}  # host memory is their place, and no detour
        reservation.came_from = {key: tier for key, tier in tiers.items() if tier != "host" or key not in shared}
        reservation.tier = _slowest(reservation.came_from.values())
        self.refresh(reservation)
        return True

    def refresh(self, reservation: Reservation) -> None:
        """Update whether the reservation is complete, and have its EMPTY entries primed."""
        if reservation.is_complete or reservation.is_given_up:
            return
        states = {key: self.cache.state(key) for key in reservation.entry_keys()}
        reservation.is_complete = all(state is EntryState.READY for state in states.values())
        empty = {key for key, state in states.items() if state is EntryState.EMPTY}
        if empty and not reservation.is_prefetch:
            self._want(reservation, empty)

    def narrow(self, reservation: Reservation, sigmas: tuple[float, ...]) -> None:
        """Turn a prefetch into a reservation of these keyframes alone: release the others, prime what is missing."""
        gone = [sigma for sigma in reservation.sigmas if sigma not in sigmas]
        reservation.sigmas, reservation.is_prefetch, reservation.is_complete = sigmas, False, False
        if reservation.is_reserved:
            self.cache.release([page_key(reservation.template.key, sigma) for sigma in gone])
            reservation.tier = _slowest(map(reservation.came_from.get, reservation.entry_keys()))
            self.refresh(reservation)

    def release(self, reservation: Reservation) -> None:
        """Release all entries of the reservation. What a worker is writing stays pinned until its result arrives."""
        if not reservation.is_reserved:
            return
        del self._reservations[reservation.owner_id]
        reservation.is_reserved = reservation.is_complete = False  # its entries may be evicted from now on
        job = self._jobs.get(reservation.template.key)
        if job is not None and job.is_in_flight:
            self._left.setdefault(job.id, []).append((reservation, reservation.entry_keys()))
            return
        self.cache.release(reservation.entry_keys())
        self._drop_unwanted(reservation.template.key)

    def tokens_left(self, job: PrimingJob) -> int:
        """Tokens that the job still has to compute, in whole passes."""
        return len(job.wanted) * job.template.pass_tokens

    def trim(self, reservation: Reservation, sigmas_left: Sequence[float]) -> None:
        """Release the keyframes that the remaining steps (at `sigmas_left`, falling) do not need, so that a template
        used once pins only two at a time.
        """
        if sigmas_left and reservation.sigmas[:1] == (
            bracket(reservation.template.scheme.keyframes, sigmas_left[0]).near,
        ):
            return  # the next step still reads the first one
        needed = set(keyframes_needed(reservation.template.scheme.keyframes, sigmas_left))
        passed = [sigma for sigma in reservation.sigmas if sigma not in needed]
        if passed and reservation.is_complete:
            reservation.sigmas = tuple(sigma for sigma in reservation.sigmas if sigma in needed)
            self.cache.release([page_key(reservation.template.key, sigma) for sigma in passed])

    def drop(self, drop: DropTemplate, info: ModelInfo) -> None:
        """Drop a template's pages, with all patch sets, on every tier once no reservation uses them. info: of its
        model."""
        if info.page_scheme is not None:
            self.cache.drop(info.page_scheme.template_key(drop.content_id, drop.cache_salt))

    def finish_copy(self, done: PageCopied) -> None:
        """Process the end of a copy between tiers, successful or not."""
        self.cache.finish_copy(done)
        for reservation in list(self._reservations.values()):
            self.refresh(reservation)
        self._drop_unwanted(template_of(done.key))

    def lose_rank(self, rank: int) -> list[Reservation]:
        """Note that a rank has died: what it has computed of passes under way is computed again. Returns the
        reservations of pages on its device, which are lost; they are to be released and made again.
        """
        self.cache.lose_rank(rank)
        for job in self._jobs.values():
            if job.rank == rank:
                job.end_passes()
        reservations = list(self._reservations.values())
        lost = [reservation for reservation in reservations if self.device_of(reservation) == rank]
        for reservation in reservations:
            if reservation not in lost:
                self.refresh(reservation)
        return lost

    def device_of(self, reservation: Reservation) -> int | None:
        """The one rank that can read what is reserved, which is on its device; None: any rank can."""
        if not reservation.is_reserved:
            return None
        return next((rank for rank in map(self.cache.writer, reservation.entry_keys()) if rank is not None), None)

    def abandon(self) -> None:
        """Fail everything in flight and release all reservations, because the workers are gone."""
        self.cache.lose_all()
        for job in list(self._jobs.values()):
            if job.is_in_flight:
                self.fail(job)
        for reservation in list(self._reservations.values()):
            self.release(reservation)

    # ------------------------------------------------------------------------------------------------- reading

    def has_span(self, reservation: Reservation, sigma: float, ranks: tuple[int, ...], *, may_load: bool) -> bool:
        """Whether these ranks can read the pages at this noise level. may_load: or wait for them, block by block."""
        keys, _ = _entries_at(reservation, sigma)
        return all(self.cache.is_readable(key, ranks, may_load=may_load) for key in keys)

    def span(self, reservation: Reservation, sigma: float) -> PageSpan:
        """The pages at this noise level, which are reserved."""
        keys, weight = _entries_at(reservation, sigma)
        far = self.cache.ref(keys[1]) if len(keys) > 1 else None
        return PageSpan(reservation.template.scheme.layout.dtype, self.cache.ref(keys[0]), far, weight)

    def loading(self, reservation: Reservation, sigma: float) -> list[tuple[Tier, int]]:
        """(tier, bytes) of each entry at this noise level that is being loaded."""
        keys, _ = _entries_at(reservation, sigma)
        refs = [self.cache.ref(key) for key in keys if self.cache.state(key) is EntryState.LOADING]
        return [(self.cache.tier_of(ref.key) or "disk", ref.nbytes) for ref in refs]

    def latents(self, template: TemplateInfo) -> EntryRef:
        """The entry of the template's clean latents, which must be reserved."""
        return self.cache.ref(template.latents_key)

    def has_latents(self, template: TemplateInfo) -> bool:
        return self.cache.state(template.latents_key) is EntryState.READY

    def ref(self, template: TemplateInfo, sigma: float) -> EntryRef:
        """The entry of a keyframe, which must be reserved."""
        return self.cache.ref(page_key(template.key, sigma))

    # ------------------------------------------------------------------------------------------------- jobs

    def jobs(self) -> list[PrimingJob]:
        """Jobs that are not in flight, oldest first."""
        return [job for job in self._jobs.values() if not job.is_in_flight]

    def all_jobs(self) -> Iterable[PrimingJob]:
        return self._jobs.values()

    def job(self, job_id: str) -> PrimingJob:
        """The job with this id."""
        return next(job for job in self._jobs.values() if job.id == job_id)

    def waiters(self, job: PrimingJob) -> list[Reservation]:
        """The reservations that wait for a job."""
        return [
            reservation
            for reservation in self._reservations.values()
            if reservation.template.key == job.template.key
            and not (reservation.is_complete or reservation.is_given_up or reservation.is_prefetch)
        ]

    def is_primed_by_another_model(self, reservation: Reservation) -> bool:
        """Whether the reservation waits for a job of another model, whose pages are equal. The models' components may
        differ, for example in where their weights are kept.
        """
        job = self._jobs.get(reservation.template.key)
        return job is not None and job.template.model != reservation.template.model and reservation in self.waiters(job)

    def is_idle_work(self, job: PrimingJob) -> bool:
        """Whether all reservations that wait for it are idle work."""
        return all(reservation.is_idle_work for reservation in self.waiters(job))

    def needs_latents(self, job: PrimingJob) -> bool:
        """Whether the template's clean latents have to be computed first."""
        return not self.has_latents(job.template)

    def can_start(self, job: PrimingJob) -> bool:
        """Whether the clean latents, which it reads, are not being loaded."""
        return self.cache.state(job.template.latents_key) is not EntryState.LOADING

    def start_latents(self, job: PrimingJob) -> tuple[ArrayRef, ...]:
        """Record that a worker encodes the template and its references; returns their pixels."""
        job.is_in_flight = True
        return self.lend_pictures(job)

    def lend_pictures(self, job: PrimingJob) -> tuple[ArrayRef, ...]:
        """The pixels of the template and its references for the batch in flight, lent by one of the waiting
        reservations."""
        lender = self.waiters(job)[0]
        lender.is_read = True
        return lender.pictures

    def start_chunk(self, job: PrimingJob, chunk: Chunk, rank: int = 0) -> None:
        """Record that this rank computes a chunk."""
        job.is_in_flight = True
        self.num_chunks += 1
        job.start_chunk(chunk, rank)

    def rank_of(self, job: PrimingJob) -> int | None:
        """The one rank that can run what comes next of a job: it has the hidden states of the passes under way, or the
        device where the result goes; None: any.
        """
        if self.needs_latents(job):
            return self.cache.writer(job.template.latents_key)
        return next((self.cache.writer(key) for key in job.wanted.values()), None) if job.rank is None else job.rank

    def finish_latents(self, job: PrimingJob, seconds: float) -> None:
        self._land(job, seconds)
        self.cache.fill(job.template.latents_key)
        self._finish_job(job)

    def finish_chunk(self, job: PrimingJob, chunk: Chunk, seconds: float) -> None:
        self._land(job, seconds)
        for key in job.finish_chunk(chunk):
            self.cache.fill(key)
        self._finish_job(job)

    def fail(self, job: PrimingJob) -> list[Reservation]:
        """End a job that failed on a worker; returns the reservations that waited for it, which are given up."""
        self._land(job, 0.0)
        waiters = self.waiters(job)
        for reservation in waiters:
            reservation.is_given_up = True
        self._end(job)
        self._finish_job(job)
        return waiters

    def undo(self, job: PrimingJob) -> None:
        """Note that the piece of a job that was in flight was not done."""
        self._land(job, 0.0)
        self._finish_job(job)

    def take_freed(self) -> list[str]:
        """Ids of jobs that have ended since the last call; a worker may still have tensors of them."""
        freed, self._freed = self._freed, []
        return freed

    def _want(self, reservation: Reservation, empty: set[str]) -> None:
        """Have these EMPTY entries primed."""
        job = self._jobs.get(reservation.template.key)
        if job is None:
            job = PrimingJob(f"prime-{next(self._job_ids)}", reservation.template)
            self._jobs[reservation.template.key] = job
        reservation.is_primed = True
        for sigma in reservation.sigmas:
            key = page_key(reservation.template.key, sigma)
            if key in empty:
                job.wanted.setdefault(sigma, key)

    def _land(self, job: PrimingJob, seconds: float) -> None:
        job.is_in_flight = False
        job.seconds += seconds
        left = [reservation for reservation, _ in self._left.get(job.id, ())]
        for reservation in [*self._reservations.values(), *left]:
            # The lender of the pictures may not be waiting any more: its pages may have been loaded meanwhile.
            if reservation.template.key == job.template.key:
                reservation.is_read = False
        # One may have been released and made again meanwhile.
        for reservation in {each.owner_id: each for each in (*self.waiters(job), *left)}.values():
            reservation.prime_seconds += seconds

    def _finish_job(self, job: PrimingJob) -> None:
        """After a result: release what was given up meanwhile, refresh the waiters, and end the job if it is done."""
        for _, keys in self._left.pop(job.id, ()):
            self.cache.release(keys)
        for reservation in self.waiters(job):
            self.refresh(reservation)
        self._drop_unwanted(job.template.key)

    def _drop_unwanted(self, template_key: str) -> None:
        """End the template's job if no reservation waits for it. Entries that are not EMPTY are taken off the job. It
        becomes the job of another model if only reservations of others wait for it: no one may load its own any more.
        """
        job = self._jobs.get(template_key)
        if job is None or job.is_in_flight:
            return
        for sigma in [s for s, key in job.wanted.items() if self.cache.state(key) is not EntryState.EMPTY]:
            job.forget(sigma)
        waiters = self.waiters(job)
        if not waiters or (not job.wanted and not self.needs_latents(job)):
            self._end(job)
        elif all(each.template.model != job.template.model for each in waiters):
            job.template = waiters[0].template
            job.end_passes()

    def _end(self, job: PrimingJob) -> None:
        del self._jobs[job.template.key]
        self._freed.append(job.id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless reservations, jobs and the cache agree."""
        self.cache.check_integrity()
        assert set(self._left) <= {job.id for job in self._jobs.values() if job.is_in_flight}
        for reservation in self._reservations.values():
            assert reservation.is_reserved
            states = {key: self.cache.state(key) for key in reservation.entry_keys()}
            assert EntryState.ABSENT not in states.values()
            stays = [state for key, state in states.items() if self.cache.writer(key) is None]  # on no device
            assert not reservation.is_complete or set(stays) <= {EntryState.READY}
