"""The systems that are compared: how each is made for a site, and what it schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.baselines.clusters import static
from benchmarks.baselines.monoliths import Monoliths, Pool, Whole, equal_pools, groups_that_fit, planned_pools
from benchmarks.simulation.compared import OURS, make
from benchmarks.simulation.lego.arrivals import Arrivals
from benchmarks.simulation.lego.site import Site, Unit
from benchmarks.simulation.machine import IMAGE_TOKENS
from core.config import OnLate
from core.handles import ModelKey
from core.scheduling.dispatch import Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.policy import SchedulingPolicy

NUM_TRAINING = 1000
"""Requests of another seed, with which pools are planned."""


class Offered(NamedTuple):
    """Requests that a site is to serve. rate: per second."""

    arrivals: Arrivals
    rate: float
    number: int  # of requests
    seed: int

    def draw(self, site: Site) -> list[tuple[float, int]]:
        """See `Arrivals.draw`."""
        return self.arrivals.draw(self.rate, self.number, len(site.workflows), self.seed)

    @property
    def training(self) -> Offered:
        """Requests of the same kind that planners may see before."""
        return self._replace(seed=self.seed + 1 if self.arrivals.kind.startswith("trace") else self.seed + 1000)


@dataclass(frozen=True)
class System:
    """What is scheduled, and how: by a policy, or where whole workflows are, in pools of ranks. max_degree, on_late:
    see SchedulerConfig.
    """

    unit: Unit
    policy: Callable[[Site], SchedulingPolicy] | None = None  # makes a new one
    pools: Callable[[Site, Offered], list[Pool]] | None = None
    max_degree: int = 2
    on_late: OnLate = "drop"

    def make(self, site: Site, offered: Offered) -> tuple[SchedulingPolicy, dict[int, tuple[ModelKey, ...]]]:
        """A new policy, and what each rank has at first: where there are several pools, what its pool needs."""
        started = {rank: site.started(self.unit, rank) for rank in range(site.num_ranks)}
        if self.policy is not None:
            return self.policy(site), started
        assert self.pools is not None, "a system has a policy or pools"
        pools = self.pools(site, offered)
        if len(pools) > 1:
            keys = {each.name: site.keys(each, self.unit) for each in site.workflows}
            for pool in pools:
                own = tuple(dict.fromkeys(key for each in sorted(pool.models) for key in keys[each]))
                if site.has_room(self.unit, own):
                    started |= dict.fromkeys(pool.ranks, own)
        return Monoliths(pools), started


def _wholes(site: Site, offered: Offered) -> dict[str, Whole]:
    shares, sizes = offered.arrivals.shares(len(site.workflows)), site.sizes("workflow")
    return {
        each.name: Whole(sizes[site.keys(each, "workflow")[0]], site.numbers.alone_seconds(each), share)
        for each, share in zip(site.workflows, shares, strict=True)
    }


def _equal(site: Site, offered: Offered) -> list[Pool]:
    return equal_pools(_wholes(site, offered), site.num_ranks)


def _planned(site: Site, offered: Offered) -> list[Pool]:
    return _pools(site, offered, [(each.name,) for each in site.workflows])


def _shepherd(site: Site, offered: Offered) -> list[Pool]:
    return _pools(site, offered, groups_that_fit(_wholes(site, offered), site.budget))


def _pools(site: Site, offered: Offered, groups: Sequence[tuple[str, ...]]) -> list[Pool]:
    names = [each.name for each in site.workflows]
    training = [(seconds, names[index]) for seconds, index in offered.training._replace(number=NUM_TRAINING).draw(site)]
    return planned_pools(groups, _wholes(site, offered), site.num_ranks, site.slo_scale, training)


def _one_pool(site: Site, offered: Offered) -> list[Pool]:
    return [Pool(frozenset(each.name for each in site.workflows), tuple(range(site.num_ranks)))]


SYSTEMS: dict[str, System] = {
    "Diffusers": System("workflow", pools=_equal),
    "Diffusers, planned": System("workflow", pools=_planned),
    "Diffusers-C": System("workflow", pools=_one_pool),
    "Diffusers-S": System("workflow", pools=_shepherd),
    "pooled": System("workflow, shared", pools=_one_pool),
    "lego": System("node", lambda site: make("lego")),
    OURS: System("node", lambda site: make(OURS)),
}
"""By name. pooled: a control that is in no paper: whole workflows on any rank, whose ranks share components."""

FIXED: dict[str, System] = {
    f"degree {degree}": System(
        "node",
        lambda site, degree=degree: static(site.num_ranks, degree, [IMAGE_TOKENS], decouples=True),  # type: ignore[misc]
    )
    for degree in (1, 2)
}
"""By name: every request has as many devices for its steps from its start to its end."""


class Unscaled(Default):
    """Leaves components where they are at first."""

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        return Loads()


ABLATIONS: dict[str, System] = {
    "nothing shared": System("node, unshared", lambda site: make(OURS)),
    "nothing scaled": System("node", lambda site: Unscaled()),
    "one device": System("node", lambda site: make(OURS), max_degree=1),
    "all admitted": System("node", lambda site: make(OURS), on_late="last"),
}
"""Ours without one of its parts, by name: each workflow has components of its own; ranks keep what they have at first;
each step is made on one device; what cannot be in time is served when nothing else needs the device.
"""


def system_of(name: str) -> System:
    """A system of SYSTEMS, FIXED or ABLATIONS; else nodes are scheduled by the policy of this name, see `make`."""
    known = SYSTEMS | FIXED | ABLATIONS
    return known[name] if name in known else System("node", lambda site: make(name))


BASELINES = ("Diffusers", "Diffusers, planned", "Diffusers-C", "Diffusers-S")
"""Those of the paper."""
