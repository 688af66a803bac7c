"""--offload host: pictures keep their bits, weights come to the device once for a batch, and their price is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_lora
from offloading import Copies, poison_what_lies_on_the_host
from torch import Tensor

from benchmarks.compare.checkpoints import MAKERS
from benchmarks.gpu.correctness import soft_picture
from benchmarks.gpu.local_engine import LocalEngine, open_offloaded
from core.config import AdapterConfig, CacheConfig, ModelConfig
from core.errors import ConfigError
from core.messages.worker import Batch, BatchResult
from core.patches import Patch, PatchSet, patch_set
from core.sampling_params import SamplingParams
from model_executor.host_weights import HostWeights
from model_executor.models.base import EncodedText, Family, ImageInputs
from model_executor.worker.loading import resident
from model_executor.worker.loading.resident import ResidentModels, edit_once, weight_bytes
from model_executor.worker.probes import cost_probe
from model_executor.worker.probes.offload_price import log_offload_price
from tools.random_checkpoints import make_flux_fill

SIDE = 64
FAMILIES = sorted(MAKERS)


def config(path: Path, **settings: Any) -> ModelConfig:
    settings = {"served_model_name": "m", "dtype": "float32", "device": "cpu", "kernels": "torch"} | settings
    return ModelConfig(model=str(path), **settings)


def loaded(models: ResidentModels) -> ResidentModels:
    models.load_all()
    return models


def both(*configs: ModelConfig) -> tuple[ResidentModels, ResidentModels]:
    """The models as usual, and with text encoders and VAE in host memory."""
    return loaded(ResidentModels.open(configs)), loaded(open_offloaded(configs))


def picture(seed: int = 0) -> Tensor:
    return torch.from_numpy(soft_picture(SIDE, seed))


def made_by(family: Family) -> list[Tensor]:
    """All that text encoders and VAE make: embeddings, latents, pixels."""
    mask = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    mask[16:48, 16:48] = 1
    info = family.info("m")
    references = [picture(2)] if info.references else []
    inputs = ImageInputs(
        template=picture(), mask=mask, seed=5, num_inference_steps=4, num_denoising_steps=3, references=references
    )
    text = family.encode_text("a hat", 12, (picture(),)) if info.max_text_tokens else family.encode_class(1)
    image = family.encode_image(inputs)
    latents = family.denoiser_input(image.begin(family.grid(SIDE, SIDE)))[:, : info.latent_width]
    region, _ = family.decode_region(latents, torch.arange(2), SIDE, SIDE)
    return [
        *(text.prompt_embeds, text.pooled_prompt_embeds, image.latents, image.condition, image.outside),
        *(family.encode_template(picture()), family.decode(latents, SIDE, SIDE), region),
    ]


def same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


# -------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_families_compute_with_weights_on_the_device_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_what_lies_on_the_host(monkeypatch)
    plain, offloaded = both(config(MAKERS[name](tmp_path / name)))
    copies = Copies(monkeypatch)
    expected = made_by(plain.families["m"])
    assert copies.take() == 0
    assert same(made_by(offloaded.families["m"]), expected)
    text_parts = offloaded.families["m"].components["text_encoder"]
    assert copies.take() >= 3 + len(text_parts)


def embedded(family: Family, patches: PatchSet) -> list[Tensor]:
    text: EncodedText = family.encode_text("a red hat", 12, (), patches)
    return [text.prompt_embeds, text.pooled_prompt_embeds]


@pytest.mark.parametrize(
    ("name", "text_parts"), [("sd", ("text_encoder",)), ("sdxl", ("text_encoder", "text_encoder_2"))]
)
@torch.inference_mode()
def test_adapters_of_text_encoders_keep_their_effect(
    name: str, text_parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is added when the others have been used: modules with adapters share the plain one's weights."""
    poison_what_lies_on_the_host(monkeypatch)
    path = MAKERS[name](tmp_path / name)
    files = [make_lora(tmp_path / f"{n}.safetensors", path, seed=n, text_parts=text_parts) for n in range(2)]
    models = both(config(path, adapters=(AdapterConfig("first", str(files[0])),)))
    texts: list[list[list[Tensor]]] = []
    for each in models:
        (first,) = (info.patch for info in each.ready(0).models if info.parent)
        family, made = each.families["m"], []
        made += [embedded(family, patches) for patches in ((), (Patch(first, 0.7),), ())]
        second = each.add_adapter("m", AdapterConfig("second", str(files[1]))).patch
        made += [embedded(family, patch_set([Patch(first, 0.7), Patch(second, 0.4)])), embedded(family, ())]
        texts.append(made)
    plain, offloaded = texts
    assert all(same(ours, expected) for ours, expected in zip(offloaded, plain, strict=True))
    assert same(plain[0], plain[2])
    assert len({tuple(text[0].flatten().tolist()) for text in plain}) == 3, "adapters change the embedding"


def test_a_quantised_denoiser_stays_and_the_rest_is_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    poison_what_lies_on_the_host(monkeypatch)
    models = both(config(make_flux_fill(tmp_path / "fill"), quantization="torchao-int8"))
    plain, offloaded = (edit_once(each.families["m"], SIDE, 12) for each in models)
    assert torch.equal(plain, offloaded)
    (stays,) = (key for key in models[1].keys["m"].values() if not models[1].is_offloaded(key))
    assert stays.component == "transformer"


def test_quantised_text_encoders_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = open_offloaded([config(make_flux_fill(tmp_path / "fill"))])
    checkpoint = models._checkpoints["m"]
    monkeypatch.setattr(
        type(checkpoint), "_stored_method", lambda _, part: "torchao" if part == "text_encoder_2" else None
    )
    assert [part for part in models.keys["m"] if checkpoint.is_offloaded(part)] == ["text_encoder", "vae"]


def test_a_shared_component_is_offloaded_once_and_can_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch)
    paths = {name: MAKERS[name](tmp_path / name) for name in ("flux", "flux_fill")}
    models = loaded(open_offloaded([config(path, served_model_name=name) for name, path in paths.items()]))
    first, second = (models.families[name] for name in paths)
    assert first.weights("vae").nbytes == second.weights("vae").nbytes > 0
    with first.weights("vae").held(), torch.inference_mode():
        clean = [family.encode_template(picture()) for family in (first, second)]
    assert torch.equal(*clean)
    assert copies.take() == 1
    models.unload(models.keys["flux"]["vae"])
    assert first.weights("vae").nbytes == 0
    models.load(models.keys["flux"]["vae"])
    with torch.inference_mode():
        assert torch.equal(second.encode_template(picture()), clean[0])


def test_models_with_and_without_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = MAKERS["flux"](tmp_path / "flux")
    configs = [config(path), config(path, served_model_name="other")]
    opened = ResidentModels.open(configs)
    assert opened.keys["m"] == opened.keys["other"]
    cuda = {name: replace(each, device=torch.device("cuda")) for name, each in opened._checkpoints.items()}
    cuda["other"] = replace(cuda["other"], offload="host")
    found = {name: resident.Opened(cuda[name], family) for name, family in opened.families.items()}
    keys = resident.component_keys(resident.parts_of_models(found), tmp_path)
    assert [part for part in keys["m"] if keys["m"][part] == keys["other"][part]] == ["transformer"]
    assert {part: cuda["other"].home_of(part).type for part in keys["m"]} == {
        "text_encoder": "cpu",
        "text_encoder_2": "cpu",
        "vae": "cpu",
        "transformer": "cuda",
    }


# ------------------------------------------------------------------------------------------------------------ batches


class Counted(LocalEngine):
    """An engine that notes the copies of every batch."""

    def __init__(self, path: Path, copies: Copies) -> None:
        self.copies = copies
        self.by_op: list[tuple[str, int, int]] = []  # op, items, copies
        super().__init__(path, "cpu", "float32", CacheConfig(host_bytes=2**28), kernels="torch", offload="host")

    def run(self, batch: Batch) -> BatchResult:
        self.copies.take()
        result = super().run(batch)
        self.by_op.append((batch.op, len(batch.items), self.copies.take()))
        return result

    def of(self, op: str) -> list[tuple[int, int]]:
        """(items, copies) of the batches since the last call."""
        found = [(items, copies) for name, items, copies in self.by_op if name == op]
        self.by_op = [each for each in self.by_op if each[0] != op]
        return found


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a model with one text encoder, which is asked for a prompt and a negative prompt of each edit."""
    with closing(Counted(MAKERS["sd"](tmp_path / "sd"), Copies(monkeypatch))) as made:
        yield made


def test_weights_come_once_for_a_batch_and_leave_with_it(engine: Counted) -> None:
    weights: list[HostWeights] = [part.weights for part in engine.family._parts.values() if hasattr(part, "weights")]  # type: ignore[attr-defined]
    sampling = SamplingParams(num_inference_steps=2, seed=7, mask_aware=False, guidance_scale=3.0)
    engine.edit([soft_picture(SIDE, seed) for seed in range(3)], sampling)
    assert len(weights) == 2
    assert not any(each._is_there for each in weights)
    for op in ("text_encode", "image_encode", "decode"):
        batches = engine.of(op)
        assert sum(items for items, _ in batches) == 3
        assert max(copies for _, copies in batches) == 1
    assert all(copies == 0 for _, copies in engine.of("denoise"))


def test_nothing_is_copied_for_what_is_known(engine: Counted) -> None:
    """Embedded prompts, a template that was just encoded."""
    sampling = SamplingParams(num_inference_steps=2, seed=7, guidance_scale=3.0, strength=0.6)
    for copies in (1, 0):
        engine.edit([soft_picture(SIDE, 0)], sampling)
        assert [each for _, each in engine.of("text_encode")] == [copies]
        assert sum(each for _, each in engine.of("image_encode") + engine.of("template_encode")) <= copies
        assert sum(each for _, each in engine.of("decode")) == 1


# ------------------------------------------------------------------------------------------------------------- prices


def test_the_price_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, offloaded = both(config(make_flux_fill(tmp_path / "fill")))
    with caplog.at_level(logging.INFO, "stencil.worker"):
        caplog.clear()
        log_offload_price(plain.loaded_families)
        assert not caplog.messages
        log_offload_price(offloaded.loaded_families)
    (line,) = caplog.messages
    start = "--offload host: weights in host memory, and how long each use copies them to the device: "
    assert line.startswith(start)
    first, second = line.removeprefix(start).split(", ")
    assert first.startswith("text_encoder of m 0.00 GiB in ")
    assert second.startswith("vae of m 0.00 GiB in ")
    assert all(part.endswith(" ms") for part in (first, second))


def test_bytes_in_host_memory_are_those_of_the_parts(tmp_path: Path) -> None:
    (_, models) = both(config(make_flux_fill(tmp_path / "fill")))
    family: Any = models.families["m"]
    for component, parts in family.components.items():
        modules = [family._parts[part]._module for part in parts if component != "transformer"]
        modules += family._vae._decoder.own_modules if component == "vae" else []
        stored = sum(map(weight_bytes, modules))
        lying = family.weights(component).nbytes
        assert stored <= lying <= 1.5 * stored + 2**18, "tensors are aligned"


def test_costs_without_are_not_taken_for_costs_with(tmp_path: Path) -> None:
    models = ResidentModels.open([config(make_flux_fill(tmp_path / "fill"))])
    (info,) = models.ready(0).models
    plain, offloaded = (cost_probe._path(info, ModelConfig(offload=each), tmp_path) for each in ("none", "host"))
    assert plain != offloaded


@torch.inference_mode()
def test_measured_costs_contain_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = loaded(open_offloaded([config(make_flux_fill(tmp_path / "fill"))]))
    copies, (info,) = Copies(monkeypatch), models.ready(0).models
    counts = {}
    for op, _, run in cost_probe.Batches(models.families["m"], info).all():
        copies.take()
        run()
        copies.take()
        run()
        counts[op.name] = copies.take()
    assert counts["text_encode"] == 2, "of two text encoders"
    assert counts["image_encode"] == counts["decode"] == 1
    assert counts["denoise"] == counts["prime"] == 0


def test_on_a_cpu_the_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--offload host: on a CPU all weights are in host memory anyway; leave it"):
        ResidentModels.open([config(tmp_path, offload="host")])
