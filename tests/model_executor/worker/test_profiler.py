"""Profiles: every op is measured by size, and a server's next start predicts from the tables."""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.costs.cost_model import CostModel
from core.graph.work import Work
from core.model_info import ModelInfo
from core.scheduling.ops.decode import DECODE
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.predictor import Predictor
from model_executor.models.base import Family
from model_executor.worker.cost_probe import known_or_probed
from model_executor.worker.profiler import SHARES, keep, profile
from model_executor.worker.resident import ResidentModels

LARGEST = 3


def test_steps_are_measured_by_batch_size_and_tokens(family: Family, info: ModelInfo) -> None:
    samples = profile(family, info, LARGEST)
    steps = {(len(sample.work.queries), sample.work.queries[0]) for sample in samples if sample.op == "denoise"}
    tokens = {number for _, number in steps}
    assert steps == {(number, each) for number in range(1, LARGEST + 1) for each in tokens}
    assert 2 <= len(tokens) <= len(SHARES)
    assert {sample.op for sample in samples} == {"text_encode", "image_encode", "decode", "denoise"}
    assert all(sample.seconds > 0 and sample.is_profile for sample in samples)


def test_the_next_start_predicts_from_the_tables(models: ResidentModels, info: ModelInfo, tmp_path: Path) -> None:
    samples = profile(models.families[info.name], info, LARGEST)
    path = keep(samples, info, tmp_path)
    assert path.stat().st_size < 1e6
    found = known_or_probed(models.families, [info], tmp_path)
    predictor = Predictor(CostModel(), {info.name: info})
    predictor.learn(found)
    measured = next(each for each in samples if each.op == "denoise" and len(each.work.queries) == LARGEST)
    assert predictor.of_op(info.name, DENOISE, measured.work) == measured.seconds
    assert predictor.largest_batch(info.name, DENOISE) == LARGEST
    assert predictor.largest_batch(info.name, DECODE) == 1, "its items are done one after the other"
    assert predictor.of_op(info.name, DENOISE, Work.of([1] * 50)) > 0.0, "outside of the table the line predicts"


def test_a_model_without_pages_is_measured_with_exact_steps_alone(family: Family, info: ModelInfo) -> None:
    samples = profile(family, msgspec.structs.replace(info, page_scheme=None), 2)
    assert all(sample.work.queries == sample.work.keys for sample in samples if sample.op == "denoise")
