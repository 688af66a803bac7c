"""Ranks: the state of each worker of an engine: whether it lives, its totals, and where its groups meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.costs.load_report import RankStats
from core.handles import LoadedComponent
from core.scheduling.ranks.model_uses import ModelUses
from core.scheduling.ranks.residency import Residency


class Ranks:
    """Owned by one scheduler. residency: the components on these ranks."""

    def __init__(self, num_ranks: int, residency: Residency) -> None:
        self.residency = residency
        self.uses = ModelUses(residency)
        self._busy_seconds = [0.0] * num_ranks  # by rank, since start
        self._deaths = [0] * num_ranks  # by rank, since start
        self._ports = [0] * num_ranks  # by rank, see `note_ports`
        self.epoch = 0  # of groups; groups of an earlier epoch are not used any more
        self.up = tuple(range(num_ranks))  # ranks whose worker lives and accepts plans, ascending

    def lose(self, rank: int) -> None:
        """Note that a rank's worker has died."""
        self.up = tuple(other for other in self.up if other != rank)
        self.note_death(rank)
        self.break_groups()
        self.residency.lose(rank)

    def note_death(self, rank: int) -> None:
        """Count a death, also of a worker that has not accepted plans yet."""
        self._deaths[rank] += 1

    def join(self, rank: int, components: Iterable[LoadedComponent], port: int = 0) -> None:
        """Note that a worker that was restarted accepts plans, and has loaded these components. port: one of
        `note_ports`.
        """
        assert rank not in self.up, f"rank {rank} is up already"
        self.up = tuple(sorted([*self.up, rank]))
        self.residency.join(rank, components)
        self._ports[rank] = port

    def note_ports(self, ports: Mapping[int, int]) -> None:
        """Note for each rank the port at which groups meet whose first member it is."""
        for rank, port in ports.items():
            self._ports[rank] = port

    def break_groups(self) -> None:
        """Let all groups be formed again, because something failed in one of them."""
        self.epoch += 1

    def meeting(self, ranks: Sequence[int]) -> tuple[int, int]:
        """(epoch, port) of the group of these ranks, for `Batch`; (0, 0) for one rank, which needs no group."""
        return (self.epoch, self._ports[ranks[0]]) if len(ranks) > 1 else (0, 0)

    def note_answer(self, rank: int, seconds: float) -> None:
        """Note worker time spent on a batch."""
        self._busy_seconds[rank] += seconds

    def stats(self) -> tuple[RankStats, ...]:
        """Statistics of every rank, in order."""
        facts, up = enumerate(zip(self._busy_seconds, self._deaths, strict=True)), frozenset(self.up)
        return tuple(
            RankStats(
                self.residency.components(rank),
                seconds,
                deaths,
                is_up=rank in up,
                models=tuple(self.uses.on(rank)) if rank in up else (),
            )
            for rank, (seconds, deaths) in facts
        )
