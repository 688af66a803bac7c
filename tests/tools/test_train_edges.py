"""The edge ControlNet's training: edges are thin and where pictures change; it learns, resumes and exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel

from tools.train_edges.edges import Lines, control_picture, edges
from tools.train_edges.evaluate import agreement
from tools.train_edges.export import averaged, export
from tools.train_edges.trainer import Recipe, Trainer
from tools.train_embedded import seeds
from tools.train_embedded.cases import cases
from tools.train_embedded.training import set_rate, state_of

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of norms in bfloat16

TINY = Recipe(batch=2, tokens=32, warm_pool=6)
BUDGET = 1e6  # seconds
STEPS = 6


def rectangle(brightness: int) -> np.ndarray:
    """A grey rectangle, its first row 20 and its last 39, columns 30 to 69, on black."""
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[20:40, 30:70] = brightness
    return picture


def test_edges_are_a_thin_closed_line_where_the_picture_changes() -> None:
    found = edges(rectangle(200))
    rows, columns = np.nonzero(found)
    assert {rows.min(), rows.max()} <= {19, 20, 39, 40}
    assert {columns.min(), columns.max()} <= {29, 30, 69, 70}
    assert not found[22:38, 32:68].any()
    assert found[:, 50].sum() == found[30].sum() == 2, "a line is one pixel wide"
    assert 2 * (20 + 40) - 8 <= found.sum() <= 2 * (20 + 40) + 8


def test_a_weak_edge_counts_where_it_touches_a_strong_one() -> None:
    picture = rectangle(60)  # its gradient is 240 of 255, times Sobel's 4
    assert not edges(picture, Lines(200, 400)).any()
    picture[20:40, 30:34] = 255
    assert edges(picture, Lines(200, 400))[20:40, 68:72].any()
    assert edges(picture, Lines(200, 400, width=3)).sum() > 2 * edges(picture, Lines(200, 400)).sum()


def test_only_what_has_its_edges_agrees_with_the_truth() -> None:
    (case,) = cases(seeds.EDGES_TEST, 1, "whole_box")
    assert control_picture(case.truth).shape == case.truth.shape
    assert agreement(case.truth, case) == 1.0
    assert 0 < agreement(np.roll(case.truth, 10, axis=1), case) < 0.9
    assert agreement(np.zeros_like(case.truth), case) == 0.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], Trainer]:
    """The folder of a training on one batch with one noise, the errors before each step, and the trainer."""
    work = tmp_path_factory.mktemp("train_edges")
    torch.manual_seed(0)
    trainer = Trainer(TINY, work, BUDGET)
    trainer.pool.grow()
    set_rate(trainer.optimisers, 3e-3)
    examples, errors = trainer.pool.steered(TINY.batch), list[float]()
    for _ in range(STEPS):
        torch.manual_seed(7)
        errors.append(trainer.learn(examples, TINY.tokens))
    trainer.keep()
    return work, errors, trainer


def test_the_error_falls(trained: tuple[Path, list[float], Trainer]) -> None:
    _, errors, _ = trained
    assert errors[-1] < 0.9 * errors[0]


def test_it_goes_on_where_it_was(trained: tuple[Path, list[float], Trainer]) -> None:
    work, _, trainer = trained
    resumed = Trainer(TINY, work, BUDGET)
    assert (resumed.step, resumed.shown, resumed.pool.drawn) == (STEPS, STEPS * TINY.batch, trainer.pool.drawn)
    for key, value in state_of(trainer.net).items():
        assert resumed.net.state_dict()[key].equal(value), key
    resumed.learn(resumed.pool.steered(TINY.batch), TINY.tokens)
    assert resumed.step == STEPS + 1


def test_the_averaged_weights_are_what_is_exported(trained: tuple[Path, list[float], Trainer], tmp_path: Path) -> None:
    work, _, trainer = trained
    export(work, tmp_path / "net")
    exported = FluxControlNetModel.from_pretrained(tmp_path / "net").controlnet_single_blocks[0].weight
    assert exported.equal(averaged(work).controlnet_single_blocks[0].weight.bfloat16())
    assert not exported.equal(trainer.net.controlnet_single_blocks[0].weight.bfloat16())
