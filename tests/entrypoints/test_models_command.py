"""`python -m entrypoints.models`: the families and checkpoints that can be served.

The child process that reads checkpoints takes seconds of processor time to start, so most tests run its code in this
process.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from adapters import make_lora
from safetensors.torch import load_file, save_file

from core.config import EMBEDDED_MODEL
from core.page_scheme import PageLayout
from entrypoints import models
from entrypoints.models import _describe, main
from model_executor.checkpoint import describe as child
from model_executor.checkpoint.describe import describe
from tools.random_checkpoints import make_sd3
from tools.random_dit_checkpoints import make_dit
from tools.random_unet_checkpoints import make_sdxl


@pytest.fixture
def _without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's code runs here."""

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, "-m", child.__name__]
        out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = child.main(command[3:])
        return subprocess.CompletedProcess(command, status, out.buffer.getvalue(), err.getvalue().encode())

    monkeypatch.setattr(models.subprocess, "run", run)


@pytest.mark.usefixtures("_without_child")
def test_families_are_listed_with_their_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    for name in ("flux-fill", "sd3", "qwen-image", "qwen-image-edit"):
        assert f"{name}: " in told
    for name in ("FluxFillPipeline", "FluxPipeline", "StableDiffusion3Pipeline", "QwenImageEditPipeline"):
        assert name in told


def test_a_checkpoint_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", EMBEDDED_MODEL]) == 0
    told = capsys.readouterr().out
    assert "family flux-fill" in told
    assert "parameters 11.9 M" in told
    assert "takes mask_aware, strength, hires_scale, shift\n" in told
    entry = PageLayout(num_blocks=7, num_heads=4, head_dim=64, dtype="int8").entry_bytes(256)
    assert f"256 tokens    {entry / 1e3:.3g} kB a keyframe" in told


def told_of(path: Path, *adapters: str) -> str:
    """The command's output for a checkpoint, with adapters given as NAME=PATH."""
    return "\n".join([*_describe(describe(str(path), adapters)), ""])


def test_fields_and_parts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """SD3 without T5: two text encoders, guidance and a negative prompt, a page for each attention."""
    told = told_of(make_sd3(tmp_path / "sd3", has_t5=False, dual_attention_layers=(0, 1)))
    assert "text_encoder_2" in told
    assert "text_encoder_3" not in told
    assert "guidance_scale (classifier-free, default 7), negative_prompt, shift\n" in told
    assert "5 keyframes of 5 int8 pages" in told


def test_a_unet_is_described(tmp_path: Path) -> None:
    told = told_of(make_sdxl(tmp_path / "sdxl"))
    assert "StableDiffusionXLPipeline, family sdxl" in told
    assert (
        "takes mask_aware, strength, hires_scale, guidance_scale (classifier-free, default 7.5), negative_prompt\n"
        in told
    )
    assert "5 keyframes of 81 int8 pages" in told


def test_a_model_of_classes_is_described_without_pages(tmp_path: Path) -> None:
    told = told_of(make_dit(tmp_path / "dit"))
    assert "DDIMScheduler, 50 steps, 1000 classes\n" in told
    assert "takes class_label (0 to 999), guidance_scale (classifier-free, default 4)\n" in told
    assert told.endswith("pictures of 64 x 64 px\n")


def test_variants_in_parts_are_counted_once(tmp_path: Path) -> None:
    path = make_sd3(tmp_path / "sd3", has_t5=False)
    told = told_of(path)
    (weights,) = (path / "transformer").glob("*.safetensors")
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16-00001-of-00001.safetensors"))
    assert told_of(path) == told


def test_a_quantised_weight_is_counted_once(tmp_path: Path) -> None:
    """torchao stores int8 numbers, a scale per row, and a header; 4-bit weights are stored two per byte."""
    path = make_sd3(tmp_path / "sd3", has_t5=False)
    told = told_of(path)
    (file,) = (path / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    header = {name: json.dumps({"_type": "Tensor"}) for name in tensors}
    for name, shape in (("transformer_blocks.0.attn.to_q", None), ("transformer_blocks.1.attn.to_q", [64, 64])):
        del tensors[f"{name}.weight"]
        tensors[f"{name}._weight_qdata"] = torch.zeros(64, 32 if shape else 64, dtype=torch.int8)
        tensors[f"{name}._weight_scale"] = torch.ones(64, 1)
        data = {"block_size": [1, 64]} | ({"shape": shape} if shape else {})
        header[f"{name}.weight"] = json.dumps({"_type": "T", "_data": data, "_tensor_data_names": ["qdata", "scale"]})
    save_file(tensors, file, header | {"format": "pt", "tensor_names": json.dumps(list(header))})
    assert told_of(path) == told


@pytest.mark.usefixtures("_without_child")
def test_adapters_that_fit_are_described_and_others_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_sd3(tmp_path / "sd3", has_t5=False)
    fits = make_lora(tmp_path / "fits.safetensors", path, r"transformer_blocks\.0\.attn\.to_[qk]")
    assert "adapter shirt: 2 layers, rank 4, 1.02 k parameters\n" in told_of(path, f"shirt={fits}")
    fits.with_suffix(".json").write_text('{"num_inference_steps": 4, "shift": 3}')
    assert "1.02 k parameters, num_inference_steps 4, shift 3.0\n" in told_of(path, f"shirt={fits}")
    capsys.readouterr()
    assert main(["--model", EMBEDDED_MODEL, "--lora", f"shirt={fits}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot use adapter shirt of {fits}: it takes transformer_blocks")


def test_a_child_process_that_ends_silently_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the kernel kills it."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "status 1" in told
    assert told.count("\n") == 1


def test_a_checkpoint_that_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "missing")]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "no model directory" in told.err
