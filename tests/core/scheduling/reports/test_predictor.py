"""Predictor: what it predicts follows what batches have taken."""

from __future__ import annotations

from fakes import MODEL

from core.config import SchedulerConfig
from core.graph.op import OPS
from core.graph.work import Work
from core.scheduling.reports.predictor import FORGET_EVERY
from core.scheduling.scheduler import StepScheduler


def test_a_prediction_that_is_kept_is_made_again_once_batches_have_taught_another() -> None:
    predictor = StepScheduler(SchedulerConfig(), {"m": MODEL})._predictor
    keys, op = predictor._bindings.keys("m", "transformer"), OPS["denoise"]
    work, large = Work.of([64]), Work.of([64] * 8)
    predictor.cost.observe(predictor.key(keys, op), work, 1.0)
    before = predictor.batch_seconds(keys, op, large)
    for _ in range(FORGET_EVERY):
        predictor.cost.observe(predictor.key(keys, op), large, before / 2)
        predictor.cost.observe(predictor.key(keys, op), work, 1.0)
    assert predictor.batch_seconds(keys, op, large) < 0.6 * before
