"""PageCosts: predicts the work of the activation cache, and chooses the faster of two ways to get pages."""

from __future__ import annotations

from collections.abc import Sequence

from core.cache.block_plan import plan_blocks
from core.cache.priming import TemplateInfo
from core.costs.cost_model import CostKey
from core.graph.work import Work
from core.graph.workflow import op_of
from core.handles import Tier
from core.model_info import ModelInfo
from core.scheduling.ops.prime import PRIME
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request


class PageCosts:
    """All times are seconds; 0 for work unlike anything observed so far."""

    def __init__(self, predictor: Predictor, bindings: Bindings) -> None:
        self._predictor = predictor
        self._bindings = bindings
        self._cost = predictor.cost

    def priming(self, template: TemplateInfo, tokens: int) -> float:
        """Time to compute `tokens` tokens of a template's priming passes."""
        return self._cost.predict(self._prime_key(template), Work((tokens,), (template.pass_tokens,)))

    def load_wins(self, template: TemplateInfo, tier: Tier, nbytes: int) -> bool:
        """Whether copying an entry up from `tier` is predicted to be faster than priming it; True for copies that were
        never measured.
        """
        prime = self._cost.predict(self._prime_key(template), Work.of([template.pass_tokens]))
        return not prime or self._cost.predict_copy(tier, nbytes) <= prime

    def full_blocks(
        self, request: Request, info: ModelInfo, num_pages: int, loading: Sequence[tuple[Tier, int]]
    ) -> tuple[int, ...]:
        """The blocks to compute in full at the request's next step while entries of (tier, bytes) are being loaded.
        info: of its model. num_pages: of an entry.
        """
        assert request.workflow.paged is not None
        op, num_rows = op_of(request.workflow.paged), request.spec.num_rows
        keys = request.keys_of(request.workflow.paged)
        every, active = request.picture.num_all_tokens, request.picture.num_active_tokens
        full = self._predictor.op_seconds(keys, op, Work.of([every] * num_rows))
        cached = self._predictor.op_seconds(keys, op, Work.of_pairs([(active, every)] * num_rows))
        load = sum(self._cost.predict_copy(tier, nbytes) for tier, nbytes in loading)
        if not full:
            return ()  # no prediction yet
        return plan_blocks(info.block_runs, num_pages, full, cached, load)

    def _prime_key(self, template: TemplateInfo) -> CostKey:
        return self._predictor.key(self._bindings.keys(template.model, *PRIME.components), PRIME)
