"""The segmenter's training: its forward pass is transformers', it learns, resumes, and exports what it has averaged."""

from pathlib import Path

import pytest
import torch
from transformers import CLIPSegForImageSegmentation

from tools.train_embedded.training import set_rate, state_of
from tools.train_segmenter.export import averaged, export
from tools.train_segmenter.models import Sizes, build_model, tokenizer_in
from tools.train_segmenter.segmenter import Segmenter
from tools.train_segmenter.tokens import logits_of, to_patches
from tools.train_segmenter.trainer import TOKENIZER, Recipe, Trainer, choose, error, take

TINY = Recipe(
    sizes=Sizes(patch=32, vision=32, vision_layers=2, text=16, text_layers=1, extracted=(0, 1), decoder=16),
    pictures=2,
    prompts=3,
    patches=24,
    warm_pool=2,
)
BUDGET = 1e9  # seconds
STEPS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], Trainer]:
    """The folder of a training, the losses step by step, and the trainer."""
    work = tmp_path_factory.mktemp("train_segmenter")
    trainer = Trainer(TINY, work, BUDGET, wording_steps=20)
    trainer.fill()
    set_rate(trainer.optimisers, 1e-2)
    losses = [trainer.learn(is_whole=step % 4 == 3) for step in range(STEPS)]
    trainer.keep()
    return work, losses, trainer


def test_the_loss_falls(trained: tuple[Path, list[float], Trainer]) -> None:
    _, losses, _ = trained
    assert sum(losses[-4:]) < 0.93 * sum(losses[:4])


def test_it_goes_on_where_it_was(trained: tuple[Path, list[float], Trainer]) -> None:
    work, _, trainer = trained
    resumed = Trainer(TINY, work, BUDGET)
    assert (resumed.step, resumed.shown, resumed.pool.drawn) == (STEPS, trainer.shown, trainer.pool.drawn)
    assert resumed.spent >= trainer.spent
    for key, value in state_of(trainer.model).items():
        assert resumed.model.state_dict()[key].equal(value), key


def test_the_averaged_weights_are_what_is_exported(trained: tuple[Path, list[float], Trainer], tmp_path: Path) -> None:
    work, _, trainer = trained
    export(work, tmp_path / "model")
    kept, latest = averaged(work).state_dict(), trainer.model.state_dict()
    name = "decoder.transposed_convolution.weight"
    exported = Segmenter(tmp_path / "model").model.state_dict()[name]
    assert exported.allclose(kept[name], atol=1e-3)
    assert not kept[name].equal(latest[name])


def test_the_forward_pass_is_that_of_transformers(trained: tuple[Path, list[float], Trainer]) -> None:
    """Over all patches; and of some alone it differs, since they cannot see the others."""
    work, _, _ = trained
    tokenizer = tokenizer_in(work / TOKENIZER)
    model = build_model(tokenizer, TINY.sizes)
    pixels = torch.randn(2, 3, 256, 256)
    text_ids = tokenizer(["hair", "her red coat", "hat", "a dog"], padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=text_ids, pixel_values=pixels.repeat_interleave(2, dim=0)).logits
        logits, features = logits_of(model, pixels, text_ids, prompts=2)
        chosen = torch.tensor([[5, 9, 60], [1, 0, 3]])
        some, _ = logits_of(model, pixels, text_ids, prompts=2, chosen=chosen)
        every, _ = logits_of(model, pixels, text_ids, prompts=2, chosen=torch.arange(64).flip(0).expand(2, -1))
    assert isinstance(model, CLIPSegForImageSegmentation)
    assert logits.allclose(to_patches(whole, 32), atol=5e-5)
    assert features.shape == (2, 64, 32)
    assert every.flip(1).allclose(logits, atol=5e-5)
    assert some.shape == (4, 3, 1024)
    assert not some.allclose(take(logits, chosen.repeat_interleave(2, dim=0)), atol=5e-5)


def test_patches_are_in_rows() -> None:
    pictures = torch.arange(2 * 4 * 6).view(2, 4, 6)
    patches = to_patches(pictures, 2)
    assert patches.shape == (2, 6, 4)
    assert patches[0, :4].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]


def test_patches_with_an_edge_are_preferred() -> None:
    shown = torch.zeros(1, 100, 4, dtype=torch.uint8)
    shown[:, :30, 0] = 3
    drawn = [set(choose(shown, 40)[0].tolist()) for _ in range(20)]
    assert all(len(chosen) == 40 for chosen in drawn)
    assert sum(len(chosen & set(range(30))) for chosen in drawn) > 20 * 24  # 12 if nothing were preferred


def test_the_error_is_least_where_the_mask_is() -> None:
    masks = torch.zeros(2, 8, 64)
    masks[0, :3] = 1  # the second is empty
    right, wrong, nothing = 20 * (masks - 0.5), -20 * (masks - 0.5), torch.full_like(masks, -10)
    assert error(right, masks) < 0.01
    assert error(right, masks) < error(nothing, masks) < error(wrong, masks)


def test_a_training_that_diverges_goes_on_from_its_averaged_weights(tmp_path: Path) -> None:
    trainer = Trainer(TINY, tmp_path, BUDGET, wording_steps=5)
    trainer.fill()
    rate = trainer._rate(0.5)
    for parameter in trainer.model.decoder.parameters():
        parameter.data.fill_(torch.inf)
    trainer.learn()
    assert (trainer.falls, trainer.step, trainer._rate(0.5)) == (1, 0, rate / 2)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    trainer.learn()
    assert (trainer.falls, trainer.step) == (1, 1)
    trainer.keep()
    assert Trainer(TINY, tmp_path, BUDGET).falls == 1
