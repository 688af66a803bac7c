"""Adapters' files that callers name: what is refused before it is read, and what must not be."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapters import make_lora, make_peft_lora
from hostile_adapters import NESTED, hostile_adapters, of_rank
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from core.config import AdapterConfig
from core.errors import ConfigError
from core.sampler_defaults import SamplerDefaults
from model_executor.patches.adapters import LoraFormat, read_adapter

FLUX = LoraFormat("FluxLoraLoaderMixin")
MAX_BYTES = 200_000_000


def read(path: Path, max_bytes: int | None = MAX_BYTES) -> dict[str, torch.Tensor]:
    """Layer -> what it adds to the layer's weights."""
    adapter = read_adapter(AdapterConfig("hat", str(path)), FLUX, max_bytes)
    return {name: low.up @ low.down for name, low in adapter.parts["transformer"].items()}


def test_hostile_files_are_refused_at_once_and_in_little_memory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, (path, reason) in hostile_adapters(tmp_path / "bad", tiny_checkpoint).items():
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with pytest.raises(ConfigError) as caught:
            read(path)
        why = str(caught.value)
        assert reason in why, name
        assert "\n" not in why, name
        assert "object has no attribute" not in why, name
        assert len(why) < 1000, name
        assert time.monotonic() - started < 2, name
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, name


def test_a_home_of_nobody_is_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"adapter hat of ~nobody\.here/x: .*no such home directory"):
        read(Path("~nobody.here/x"))


@pytest.mark.parametrize(
    ("beside", "metadata", "said"),
    [
        (
            '{"shift": 0}',
            {},
            "hat.json: Invalid 'shift': decimal below minimum value. Expected a value >= 0.01, but got",
        ),
        ('{"num_inference_steps": 4.5}', {}, "hat.json: Invalid type for 'num_inference_steps'"),
        ('{"guidance_scale": "5"}', {}, "hat.json: Invalid type for 'guidance_scale'"),
        ('{"sigmas": [0.5, 1]}', {}, "hat.json: Invalid 'sigmas': must be 1 to 200 noise levels that fall"),
        ('{"shift": ' + "9" * 400 + "}", {}, "hat.json: Invalid type for 'shift': number out of range"),
        ("[4]", {}, "hat.json is no object"),
        ("{", {}, "hat.json is no JSON: "),
        (NESTED, {}, "hat.json is no JSON: "),
        (
            "",
            {"num_inference_steps": "201"},
            "its metadata: Invalid 'num_inference_steps': integer above maximum value",
        ),
        ("", {"shift": "three"}, "its metadata: shift: 'three' is no number"),
        ("", {"true_cfg_scale": "NaN"}, "its metadata: Invalid 'true_cfg_scale': expected a finite number"),
    ],
)
def test_settings_that_no_request_could_have_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, beside: str, metadata: dict[str, str], said: str
) -> None:
    path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint, "x_embedder", metadata=metadata)
    if beside:
        (tmp_path / "hat.json").write_text(beside)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"cannot use adapter hat of {path}: {said}")
    assert "\n" not in str(caught.value)


def test_settings_that_the_models_scheduler_lacks_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Whichever place they are from; those that it has, and all that is none, are taken."""
    path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint, "x_embedder", metadata={"shift": "3"})
    (tmp_path / "hat.json").write_text('{"num_inference_steps": 1, "shift": null, "steps": "?"}')
    lacking = LoraFormat("FluxLoraLoaderMixin", has_shift=False, takes_sigmas=False, min_steps=2)
    with pytest.raises(ConfigError, match=f"hat of {path}: shift: the model's scheduler takes none; leave it out"):
        read_adapter(AdapterConfig("hat", str(path)), lacking)
    assert read_adapter(AdapterConfig("hat", str(path)), FLUX).defaults == SamplerDefaults(
        num_inference_steps=1, shift=3.0
    )
    plain = make_lora(tmp_path / "plain.safetensors", tiny_checkpoint, "x_embedder")
    for defaults, said in (
        (SamplerDefaults(sigmas=(1.0, 0.5)), "sigmas: the model's scheduler takes none"),
        (SamplerDefaults(num_inference_steps=1), "num_inference_steps: its sampler takes at least 2 steps"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_adapter(AdapterConfig("hat", str(plain), defaults), lacking)


def test_what_is_left_for_adapters_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint)
    nbytes = sum(4 * tensor.numel() for tensor in load_file(path).values())
    read(path, nbytes)
    with pytest.raises(ConfigError, match=r"and 0 MB are left .* unload others"):
        read(path, nbytes - 1)


def test_a_file_that_is_truncated_later_harms_no_adapter(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Numbers that are mapped from it would end the process."""
    path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint, "x_embedder")
    adapter = read_adapter(AdapterConfig("hat", str(path)), FLUX)
    before = read(path)
    os.truncate(path, 8)
    low = adapter.parts["transformer"]["x_embedder"]
    assert torch.equal(low.up @ low.down, before["x_embedder"])


def test_a_file_is_open_and_mapped_only_while_it_is_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint, "x_embedder")
    adapter = read_adapter(AdapterConfig("hat", str(path)), FLUX)
    assert adapter.patch == hashlib.sha256(path.read_bytes()).hexdigest()
    maps = Path("/proc/self/maps").read_text()
    assert str(path) not in maps
    assert "memfd:adapter" not in maps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rank_above_a_narrow_layers_width_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """As of adapters that were merged by joining them, stored in half precision."""
    path = of_rank(tmp_path / "wide.safetensors", 1024)
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    assert read(path)["x_embedder"].shape == (64, 64)


PATTERNS = ("x_embedder", r"^x_embedder", r"x_embedder$", r"transformer_blocks.0.attn.to_q", r"attn\.to_q", "to_q")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_of_layers_are_patterns_as_peft_understands_them(
    tiny_checkpoint: Path, tmp_path: Path, pattern: str
) -> None:
    path = make_peft_lora(tmp_path / "hat", tiny_checkpoint, r"x_embedder|.*to_q", alpha=4.0)
    config = {"r": 4, "lora_alpha": 4, "alpha_pattern": {}}
    (path / "adapter_config.json").write_text(json.dumps(config))
    plain = read(path)
    (path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"other": 1, pattern: 12}}))
    found = read(path)
    changed = {name for name in plain if not torch.equal(plain[name], found[name])}
    assert changed == {name for name in plain if get_pattern_key([pattern], name) == pattern}
    assert changed


@pytest.mark.parametrize("patterns", [("to_q", "attn.to_q", "^x"), (r"^x_embedder", "attn.to_q", "to_q", "x_embedder")])
def test_of_several_patterns_the_first_that_matches_counts(
    tiny_checkpoint: Path, tmp_path: Path, patterns: tuple[str, ...]
) -> None:
    path = make_peft_lora(tmp_path / "hat", tiny_checkpoint, r"x_embedder|.*to_q", alpha=4.0)
    config = {"r": 4, "lora_alpha": 4}
    (path / "adapter_config.json").write_text(json.dumps(config))
    plain = read(path)
    alphas = {pattern: 4 << place for place, pattern in enumerate(patterns, 1)}
    (path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": alphas}))
    for name, addition in read(path).items():
        assert torch.equal(addition, plain[name] * (alphas.get(get_pattern_key(patterns, name), 4) / 4)), name


def test_pefts_default_alpha_is_that_of_a_configuration_without(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = make_peft_lora(tmp_path / "hat", tiny_checkpoint, "x_embedder", alpha=8.0)
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    told = read(path)
    (path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    assert torch.equal(read(path)["x_embedder"], told["x_embedder"])


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "corda", "OLoRA", "lora_ga", "loftq"])
@pytest.mark.parametrize("has_folder", [True, False], ids=["peft", "diffusers"])
def test_what_belongs_to_a_changed_model_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, start: str, has_folder: bool
) -> None:
    """Loading it, peft first takes out of the model's own weights what training started from."""
    if has_folder:
        path = make_peft_lora(tmp_path / "hat", tiny_checkpoint, "x_embedder")
        (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "init_lora_weights": start}))
    else:
        config = {"transformer.r": 4, "transformer.lora_alpha": 4, "transformer.init_lora_weights": start}
        metadata = {"lora_adapter_metadata": json.dumps(config)}
        path = make_lora(tmp_path / "hat.safetensors", tiny_checkpoint, "x_embedder", metadata=metadata)
    with pytest.raises(ConfigError, match=f"init_lora_weights is {start}"):
        read(path)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_where_training_started_from_does_not_count_otherwise(
    tiny_checkpoint: Path, tmp_path: Path, start: object
) -> None:
    path = make_peft_lora(tmp_path / "hat", tiny_checkpoint, "x_embedder")
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    plain = read(path)
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "init_lora_weights": start}))
    assert torch.equal(read(path)["x_embedder"], plain["x_embedder"])


MIDDLE, TEXT = "mid_block.attentions.0.transformer_blocks.0", "text_model.encoder.layers.0"
OF_KOHYA = {
    "unet": (f"{MIDDLE}.attn1.to_q", f"{MIDDLE}.attn2.to_out.0", f"{MIDDLE}.ff.net.2", "mid_block.resnets.0.conv1"),
    "te": (f"{TEXT}.self_attn.k_proj", f"{TEXT}.self_attn.out_proj", f"{TEXT}.mlp.fc1"),
}
"""kohya's name of a part -> some of its layers."""


def test_each_layer_of_kohyas_has_its_own_alpha(tmp_path: Path) -> None:
    """Those of attention, too, whose alphas diffusers' loader names by their tensors."""
    tensors, number = dict[str, torch.Tensor](), 0
    for part, layers in OF_KOHYA.items():
        for layer in layers:
            number, name = number + 1, f"lora_{part}_{layer.replace('.', '_')}"
            down, up = torch.ones(2, 8), torch.full((8, 2), 2.0)
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            tensors[f"{name}.alpha"] = torch.tensor(float(number))
    save_file(tensors, tmp_path / "kohya.safetensors")
    config, loader = SimpleNamespace(layers_per_block=2), "StableDiffusionLoraLoaderMixin"
    of_unets = LoraFormat(loader, denoiser="unet", text_parts=("text_encoder",), unet=config)
    adapter = read_adapter(AdapterConfig("hat", str(tmp_path / "kohya.safetensors")), of_unets)
    found = {layer: low.up.unique().tolist() for part in adapter.parts.values() for layer, low in part.items()}
    layers = [layer for part in OF_KOHYA.values() for layer in part]
    assert found == {layer: [number] for number, layer in enumerate(layers, 1)}
