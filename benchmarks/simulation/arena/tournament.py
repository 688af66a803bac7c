"""Tournament: plays contests, each by all policies and seeds, in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

from benchmarks.simulation.arena.contest import Contest, Results, Values

Run = tuple[Contest, str, int]
"""(contest, policy, seed)"""


@dataclass(frozen=True)
class Played:
    """A contest, and what is measured in it."""

    group: str  # name of the scenario that the contest belongs to
    contest: Contest
    results: Results
    broken: Mapping[str, str]  # policy -> what went wrong in one of its runs; such a policy has no results


def play(
    groups: Iterable[tuple[str, Sequence[Contest]]], only: Sequence[str] | None, num_seeds: int, processes: int
) -> Iterator[Played]:
    """All contests, in order, as they are done. only: policies, None: all. processes: that run them; 1: this one."""
    pairs = [(group, contest) for group, contests in groups for contest in contests]
    runs = [
        (contest, policy, seed)
        for _, contest in pairs
        for policy in _policies(contest, only)
        for seed in range(_seeds(contest, num_seeds))
    ]
    if processes == 1:
        yield from _collected(pairs, only, num_seeds, map(_run, runs))
        return
    with get_context("forkserver").Pool(processes) as pool:
        yield from _collected(pairs, only, num_seeds, pool.imap(_run, runs))


def _collected(
    pairs: Iterable[tuple[str, Contest]], only: Sequence[str] | None, num_seeds: int, found: Iterator[Values | str]
) -> Iterator[Played]:
    for group, contest in pairs:
        number, results, broken = _seeds(contest, num_seeds), dict[str, list[Values]](), dict[str, str]()
        for policy in _policies(contest, only):
            of_seeds = list(islice(found, number))
            if failures := [each for each in of_seeds if isinstance(each, str)]:
                broken[policy] = failures[0]
            else:
                results[policy] = [each for each in of_seeds if not isinstance(each, str)]
        yield Played(group, contest, results, broken)


def _policies(contest: Contest, only: Sequence[str] | None) -> list[str]:
    """The policies of a contest that are to play. only: names; None: all."""
    return [policy for policy in contest.policies if only is None or policy in only]


def _seeds(contest: Contest, number: int) -> int:
    return number if contest.most_seeds is None else min(number, contest.most_seeds)


def _run(run: Run) -> Values | str:
    """The values; what went wrong, if the policy left requests or decided what cannot be carried out."""
    contest, policy, seed = run
    try:
        return contest.play(policy, seed)
    except AssertionError as error:
        return f"seed {seed}: {error}"
