"""StepHomes: on which rank each small request makes its steps, and so which of them share steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from core.scheduling.policies.step_speeds import StepCost
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request


class StepHomes:
    """The homes of one policy. Requests stay where they are; newcomers go where their steps will be shortest."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[ModelKeys, int]] = {}  # request id -> components of its steps -> rank
        self._on = defaultdict[int, dict[str, dict[ModelKeys, None]]](dict)  # rank -> its requests and components
        self._costs: dict[str, StepCost] = {}  # by request id

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        for rank in self._ranks.pop(request_id, {}).values():
            self._on[rank].pop(request_id, None)
        self._costs.pop(request_id, None)

    def find(self, request: Request, keys: ModelKeys) -> int | None:
        """The rank on which a request makes the steps that need these components; None: it has none yet."""
        return self._ranks.get(request.id, {}).get(keys)

    def of(self, request: Request) -> int | None:
        """The rank on which a request makes its next steps, or has made the last ones."""
        keys = request.denoiser
        return None if keys is None else self.find(request, keys)

    def set(self, request: Request, keys: ModelKeys, rank: int, cost: StepCost) -> None:
        """Note where a request is to make the steps that need these components."""
        places = self._ranks.setdefault(request.id, {})
        if (last := places.get(keys)) is not None and last != rank:
            self._leave(request.id, keys, last)
        places[keys] = rank
        self._on[rank].setdefault(request.id, {})[keys] = None
        self._costs[request.id] = cost

    def _leave(self, request_id: str, keys: ModelKeys, rank: int) -> None:
        own = self._on[rank][request_id]
        del own[keys]
        if not own:
            del self._on[rank][request_id]

    def place(self, request: Request, keys: ModelKeys, ranks: Sequence[int], cost: StepCost) -> int:
        """Choose a home: where the request makes other steps, if that is among these ranks, or else where a round of
        steps of all requests will take least time. ranks: at least one.
        """
        own = [rank for rank in self._ranks.get(request.id, {}).values() if rank in ranks]
        number = self.num_on(ranks)
        costs = ((self.round_seconds(rank, keys, cost), number[rank], rank) for rank in ranks)
        rank = own[0] if own else min(costs)[-1]
        self.set(request, keys, rank, cost)
        return rank

    def round_seconds(self, rank: int, keys: ModelKeys, newcomer: StepCost) -> float:
        """Seconds that a rank takes for a step of each of its requests and of a newcomer, those of equal components in
        one batch.
        """
        seconds, seen = newcomer.base + newcomer.extra, {keys}
        for name, own in self._on[rank].items():
            base, extra = self._costs[name]
            for other in own:
                seconds += extra if other in seen else base + extra
                seen.add(other)
        return seconds

    def num_on(self, ranks: Iterable[int]) -> dict[int, int]:
        """Rank -> number of requests at home there."""
        return {rank: len(self._on[rank]) for rank in ranks}
