"""Whole edits through the runner against diffusers' FluxFillPipeline: same checkpoint, seed, steps, size; float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from edits import Edit, picture
from pipeline_rig import PROMPT, Rig, assert_same

from core.ipc.shared_array import Arena
from model_executor.models.base import ImageInputs
from tools.random_checkpoints import make_flux_fill


@pytest.fixture(scope="module")
def rig(tiny_checkpoint: Path, arena: Arena) -> Iterator[Rig]:
    rig = Rig(tiny_checkpoint, arena, FluxFillPipeline)
    yield rig
    rig.pages.close()


@pytest.mark.parametrize(
    ("size", "steps", "seed"),
    [((128, 128), 4, 0), ((96, 160), 7, 5), ((256, 64), 1, 2**63 - 1), ((16, 48), 3, 11)],
)
def test_edit_equals_the_pipeline(rig: Rig, size: tuple[int, int], steps: int, seed: int) -> None:
    edit = rig.edit(f"{size}-{seed}", seed=seed, steps=steps, size=size)
    assert_same(rig.run(edit), rig.expected(edit))


@pytest.mark.parametrize("strength", [0.35, 0.6, 0.99])
def test_strength_below_one_equals_the_pipeline(rig: Rig, strength: float) -> None:
    edit = rig.edit(f"strength-{strength}", seed=4, steps=6, size=(96, 96))
    edit.strength = strength
    assert_same(rig.run(edit), rig.expected(edit))


def test_plain_schedule_without_guidance_equals_the_pipeline(tmp_path: Path, arena: Arena) -> None:
    """No dynamic shifting, a constant shift, no guidance embedding."""
    rig = Rig(make_flux_fill(tmp_path / "plain", seed=1, scheduler={"shift": 3.0}), arena, FluxFillPipeline)
    edit = rig.edit("plain", seed=9, steps=5, size=(96, 64), prompt="")
    assert_same(rig.run(edit), rig.expected(edit))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of other sizes and step counts join and leave; each keeps its own bytes, and equals the pipeline's."""
    shapes = [((128, 128), 4), ((96, 160), 7), ((64, 64), 2), ((48, 176), 5)]
    edits = [rig.edit(f"mixed-{i}", seed=i, steps=steps, size=size) for i, (size, steps) in enumerate(shapes)]
    rig.assert_company_changes_nothing(edits, rig.expected)


def test_clean_prediction_of_the_last_step_is_the_result(rig: Rig) -> None:
    """At the last step the next noise level is 0, so the predicted clean latents are the final ones."""
    edit = rig.edit("clean", seed=2, steps=2, size=(64, 64))
    rig.do(edit.encode_plan())
    rig.do(edit.denoise_plan(0))
    rig.do(edit.denoise_plan(1, keep_clean=True))
    clean, latents = (rig.store.get(edit.state_key(name, 2)) for name in ("clean", "latents"))
    torch.testing.assert_close(clean, latents)
    rig.do(edit.decode_plan())


def test_an_item_whose_inputs_were_never_made_fails_alone(rig: Rig) -> None:
    """As after a failed step behind which the next one had been sent: the others of its batch are not repeated."""
    sound, stray = (rig.edit(name, seed=1, steps=2, size=(64, 64)) for name in ("sound", "stray"))
    expected = rig.run(rig.edit("alone", seed=1, steps=2, size=(64, 64)))
    for edit in (sound, stray):
        rig.do(edit.encode_plan())
    rig.do(sound.denoise_plan(0))
    result = rig.runner.run(Edit.denoise_batch([sound, stray], {sound: 1, stray: 1}))
    failures = {item.request_id: item.failure for item in result.items}
    assert failures["sound"] is None
    assert failures["stray"] is not None
    assert "an earlier step failed" in failures["stray"].message
    assert result.num_parts == 1
    rig.do(sound.decode_plan())
    rig.store.free(stray.key("", ""))
    assert np.array_equal(sound.result(), expected)


def test_text_result_has_its_length(rig: Rig) -> None:
    """The number of tokens used (with the end mark, without padding), and whether either encoder had to cut."""
    for prompt, num_tokens, truncated in (("", 1, False), ("a hat", 3, False), (PROMPT, 16, True)):
        edit = rig.edit("text", seed=0, steps=1, size=(16, 16), prompt=prompt)
        text = rig.do(edit.encode_plan())[0].items[0]
        assert (text.text_tokens, text.prompt_truncated) == (num_tokens, truncated)
        rig.store.free(edit.key("", ""))


def test_a_bad_edit_fails_alone_and_changes_nothing_of_the_others(rig: Rig) -> None:
    """A batch that fails is tried in parts: the sampler state of the good edit advances by one step, not two."""
    good, bad = (rig.edit(name, seed=3, steps=2, size=(64, 64)) for name in ("good", "bad"))
    expected = rig.expected(good)
    rig.do(good.encode_plan())
    result = rig.runner.run(Edit.denoise_batch([good, bad], {good: 0, bad: 0}))
    assert [item.failure and item.failure.kind for item in result.items] == [None, "engine"]
    for plan in (good.denoise_plan(1), good.decode_plan()):
        rig.do(plan)
    assert_same(good.result(), expected)


def test_out_of_memory_is_named(rig: Rig) -> None:
    """A step that asks PyTorch for more memory than there is fails as out of memory."""
    edit = rig.edit("huge", seed=0, steps=1, size=(16, 16))
    rig.do(edit.encode_plan())
    edit.size = (2**24, 2**24)
    failure = rig.runner.run(edit.denoise_plan(0).batches[0]).items[0].failure
    assert failure is not None
    assert failure.kind == "out_of_memory"
    rig.store.free(edit.key("", ""))


def test_a_broken_device_is_no_requests_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every computation on it fails, also one that is tried only once: the worker ends."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    edit = rig.edit("late", seed=0, steps=1, size=(16, 16))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):  # its text is not encoded yet
        rig.runner.run(edit.denoise_plan(0).batches[0])


def templates() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(picture(7, (96, 64))), torch.zeros(64, 96, dtype=torch.uint8)


@pytest.mark.usefixtures("slow_bfloat16")
@torch.inference_mode()
def test_template_latents_are_the_posterior_mode(rig: Rig) -> None:
    """Scaled and packed as FluxFillPipeline does with its sample."""
    template, _ = templates()
    vae = rig.pipeline.vae
    mode = vae.encode(
        rig.pipeline.image_processor.preprocess(template.permute(2, 0, 1)[None] / 255.0)
    ).latent_dist.mode()
    scaled = (mode - vae.config.shift_factor) * vae.config.scaling_factor
    expected = rig.pipeline._pack_latents(scaled, 1, 16, 8, 12)[0]
    torch.testing.assert_close(rig.family.encode_template(template), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_priming_noise_depends_on_the_content_only(rig: Rig) -> None:
    """On a straight line between clean latents and noise; the noise does not depend on the picture or the level."""
    clean = rig.family.encode_template(templates()[0])
    one, half, other = "3f" * 32, torch.tensor(0.5), "40" * 32
    noise = rig.family.content_noise(torch.zeros_like(clean), one)
    assert torch.equal(rig.family.prime_inputs(clean, noise, torch.tensor(0.0))[0], clean)
    assert torch.equal(rig.family.prime_inputs(clean, noise, torch.tensor(1.0))[0], noise)
    torch.testing.assert_close(rig.family.prime_inputs(clean, noise, half)[0], 0.5 * clean + 0.5 * noise)
    assert not torch.equal(rig.family.content_noise(clean, other), noise)
    anothers = rig.family.content_noise(clean, one + "5a" * 32)
    assert torch.equal(anothers, noise), "whosever it is"
    assert abs(float(noise.mean())) < 0.1
    assert abs(float(noise.std()) - 1.0) < 0.1


@torch.inference_mode()
def test_priming_condition_is_that_of_an_image_with_nothing_masked(rig: Rig) -> None:
    """As in the pipeline for an empty mask, but with the posterior's mode instead of a sample."""
    template, empty = templates()
    clean = rig.family.encode_template(template)
    _, condition = rig.family.prime_inputs(clean, torch.zeros_like(clean), torch.tensor(0.25))
    inputs = ImageInputs(template=template, mask=empty, seed=0, num_inference_steps=1, num_denoising_steps=1)
    sampled = rig.family.encode_image(inputs).condition
    assert torch.equal(condition[:, :64], clean)
    assert torch.equal(condition[:, 64:], sampled[:, 64:])


def test_sampler_that_draws_noise_equals_the_pipeline(tmp_path: Path, arena: Arena) -> None:
    """From the request's own generator, after the noise for latents and condition."""
    path = make_flux_fill(tmp_path / "noisy", scheduler={"stochastic_sampling": True, "use_dynamic_shifting": True})
    rig = Rig(path, arena, FluxFillPipeline)
    for strength in (1.0, 0.6):
        edit = rig.edit(f"noisy-{strength}", seed=6, steps=5, size=(64, 96))
        edit.strength = strength
        assert_same(rig.run(edit), rig.expected(edit))
    rig.pages.close()
