"""`python -m entrypoints.models`: what can be served, told without torch in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from adapters import make_lora

from core.config import EMBEDDED_MODEL
from core.page_scheme import PageLayout
from entrypoints.models import main
from tools.random_checkpoints import make_sd3
from tools.random_unet_checkpoints import make_sdxl


def test_families_are_listed_with_their_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    for name in ("flux-fill", "sd3", "qwen-image", "qwen-image-edit"):
        assert f"{name} " in told
    for name in ("FluxFillPipeline", "FluxPipeline", "StableDiffusion3Pipeline", "QwenImageEditPipeline"):
        assert name in told


def test_a_checkpoint_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", EMBEDDED_MODEL]) == 0
    told = capsys.readouterr().out
    assert "family flux-fill" in told
    assert "parameters 11.9 M" in told
    assert "takes mask_aware, strength\n" in told
    entry = PageLayout(num_blocks=7, num_heads=4, head_dim=64, dtype="int8").entry_bytes(256)
    assert f"256 tokens    {entry / 1e3:.3g} kB a keyframe" in told


def test_fields_and_parts_are_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SD3 without T5: two text encoders, guidance and a negative prompt, a page for each attention."""
    path = make_sd3(tmp_path / "sd3", has_t5=False, dual_attention_layers=(0, 1))
    assert main(["--model", str(path)]) == 0
    told = capsys.readouterr().out
    assert "text_encoder_2" in told
    assert "text_encoder_3" not in told
    assert "guidance_scale (classifier-free, default 7), negative_prompt\n" in told
    assert "5 keyframes of 5 int8 pages" in told


def test_a_unet_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(make_sdxl(tmp_path / "sdxl"))]) == 0
    told = capsys.readouterr().out
    assert "StableDiffusionXLPipeline, family sdxl" in told
    assert "takes mask_aware, strength, guidance_scale (classifier-free, default 7.5), negative_prompt\n" in told
    assert "5 keyframes of 20 int8 pages" in told


def test_variants_in_parts_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_sd3(tmp_path / "sd3", has_t5=False)
    assert main(["--model", str(path)]) == 0
    told = capsys.readouterr().out
    (weights,) = (path / "transformer").glob("*.safetensors")
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16-00001-of-00001.safetensors"))
    assert main(["--model", str(path)]) == 0
    assert capsys.readouterr().out == told


def test_adapters_that_fit_are_told_of_and_others_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_sd3(tmp_path / "sd3", has_t5=False)
    fits = make_lora(tmp_path / "fits.safetensors", path, r"transformer_blocks\.0\.attn\.to_[qk]")
    assert main(["--model", str(path), "--lora", f"shirt={fits}"]) == 0
    assert "adapter shirt: 2 layers, rank 4, 1.02 k parameters\n" in capsys.readouterr().out
    assert main(["--model", EMBEDDED_MODEL, "--lora", f"shirt={fits}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot use adapter shirt of {fits}: it takes transformer_blocks")


def test_a_reader_that_ends_without_a_word_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the kernel kills."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "status 1" in told
    assert told.count("\n") == 1


def test_what_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    for model, reason in (
        (tmp_path / "missing", "no model directory"),
        (tmp_path, "is not supported; supported: Flux"),
    ):
        assert main(["--model", str(model)]) == 1
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert reason in told.err
