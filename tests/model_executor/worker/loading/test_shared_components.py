"""Models that share components hold them once, and make the same pictures as alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapters import make_lora

from core.config import AdapterConfig, ModelConfig
from core.costs.cost_model import CostKey, CostModel
from core.graph.op import Op
from core.handles import VALUE_ARENA
from core.ipc.shared_array import Arena
from core.patches import Patch, PatchSet
from core.scheduling.ops.decode import DECODE
from core.scheduling.ops.denoise import DENOISE
from core.scheduling.ops.image_encode import IMAGE_ENCODE
from core.scheduling.reports.predictor import Player, Predictor
from core.scheduling.requests.bindings import Bindings
from model_executor.models.base import Family
from model_executor.page_cache.page_store import PageStore
from model_executor.worker.loading.resident import ResidentModels, edit_once, weight_bytes
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.stores.tensor_store import TensorStore
from tools.random_checkpoints import make_flux, make_flux_fill
from tools.random_unet_checkpoints import make_sd

SHARED = {"text_encoder", "text_encoder_2", "vae"}


def load(*, adapters: tuple[AdapterConfig, ...] = (), **paths: Path) -> ResidentModels:
    """adapters: of the last model."""
    names = list(paths)
    configs = [
        ModelConfig(
            model=str(path),
            served_model_name=name,
            dtype="float32",
            device="cpu",
            adapters=adapters if name == names[-1] else (),
        )
        for name, path in paths.items()
    ]
    models = ResidentModels.open(configs)
    models.load_all()
    return models


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two families that share all but the denoiser, another checkpoint of the first, and a UNet."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "fill": make_flux_fill(folder / "fill"),
        "dev": make_flux(folder / "dev"),
        "tuned": make_flux(folder / "tuned", guidance_embeds=True),
        "sd": make_sd(folder / "sd"),
    }


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> ResidentModels:
    return load(**paths)


def picture(family: Family, patches: PatchSet = ()) -> torch.Tensor:
    torch.manual_seed(0)
    return edit_once(family, 64, 12, patches)


def test_what_is_equal_is_in_memory_once(models: ResidentModels) -> None:
    fill, dev, tuned, sd = (models.families[name] for name in ("fill", "dev", "tuned", "sd"))
    for part in SHARED:
        first, *others = (family._parts[part] for family in (fill, dev, tuned))  # type: ignore[attr-defined]
        assert all(other is first for other in others)
    assert sd._vae is not dev._vae  # type: ignore[attr-defined]
    assert len({id(family._denoiser) for family in (fill, dev, tuned, sd)}) == 4  # type: ignore[attr-defined]
    assert len(models.loaded) == len(SHARED) + 3 + 3


def test_the_bytes_are_those_of_the_distinct_components(models: ResidentModels, paths: dict[str, Path]) -> None:
    told = {loaded.key: loaded.nbytes for loaded in models.loaded}
    distinct = {key: (name, part) for name, keys in models.keys.items() for part, key in keys.items()}
    on_disk = {
        key: sum(file.stat().st_size for file in (paths[name] / part).glob("*.safetensors"))
        for key, (name, part) in distinct.items()
    }
    assert told.keys() == on_disk.keys()
    for key, nbytes in told.items():
        assert 0.8 * on_disk[key] < nbytes <= 1.1 * on_disk[key], key  # files have headers; buffers are not in them


@pytest.mark.parametrize("name", ["fill", "dev", "tuned", "sd"])
def test_pictures_are_those_of_the_model_alone(models: ResidentModels, paths: dict[str, Path], name: str) -> None:
    alone = load(**{name: paths[name]})
    assert torch.equal(picture(models.families[name]), picture(alone.families[name]))


def test_a_shared_component_is_dropped_and_loaded_for_all(models: ResidentModels) -> None:
    before, key = picture(models.families["dev"]), models.keys["fill"]["vae"]
    models.unload(key)
    assert key not in {loaded.key for loaded in models.loaded}
    for name in ("fill", "dev", "tuned"):
        with pytest.raises(KeyError, match="the vae is not loaded"):
            picture(models.families[name])
    picture(models.families["sd"])
    models.load(key)
    assert torch.equal(picture(models.families["dev"]), before)


@pytest.mark.parametrize("name", ["dev", "sd"])
def test_an_adapter_of_one_model_is_not_the_others_and_survives_a_reload(
    paths: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """They share all components; the second alone has the adapter, which changes a UNet's text encoder too."""
    text_parts = ("text_encoder",) if name == "sd" else ()
    file = make_lora(tmp_path / "red.safetensors", paths[name], text_parts=text_parts)
    models = load(adapters=(AdapterConfig("red", str(file)),), plain=paths[name], adapted=paths[name])
    assert models.keys["plain"] == models.keys["adapted"]
    plain, adapted = models.families["plain"], models.families["adapted"]
    red = tuple(Patch(info.patch) for info in models.ready(0).models if info.parent)
    assert (plain.lacking(red), adapted.lacking(red)) == (red, ())
    before, changed = picture(plain), picture(adapted, red)
    assert torch.equal(picture(adapted), before)
    assert not torch.equal(changed, before)
    for key in {key for part, key in models.keys["adapted"].items() if part != "vae"}:
        models.unload(key)
        models.load(key)
    assert torch.equal(picture(adapted, red), changed)
    file.write_bytes(make_lora(tmp_path / "other.safetensors", paths[name], seed=2).read_bytes())
    models.load(key)
    assert re.search(r"cannot use adapter red of .*the file has changed since it was loaded", caplog.text)
    assert adapted.lacking(red) == red, "it fails its own requests only"
    assert torch.equal(picture(adapted), before)


@pytest.fixture
def context(models: ResidentModels) -> Iterator[WorkerContext]:
    arena = Arena.create(VALUE_ARENA, 1 << 20)
    pages = PageStore(torch.device("cpu"), arena, None, lambda _: None, 0)
    store = TensorStore(0, torch.device("cpu"), arena)
    yield WorkerContext(models.families, store, arena, pages, models.prompts_of)
    pages.close()
    arena.close()


@torch.inference_mode()
def test_a_prompt_embedded_for_one_model_serves_the_other(context: WorkerContext, models: ResidentModels) -> None:
    text = context.prompts["fill"].encode("a red hat", 12)
    assert context.prompts["dev"].encode("a red hat", 12) is text
    assert context.prompts["sd"] is not context.prompts["dev"]
    own = models.families["dev"].encode_text("a red hat", 12)
    assert torch.equal(own.prompt_embeds, text.prompt_embeds)
    assert torch.equal(own.pooled_prompt_embeds, text.pooled_prompt_embeds)


def test_models_of_one_family_share_the_costs_of_what_they_share(models: ResidentModels) -> None:
    bindings = Bindings({info.name: info for info in models.ready(0).models})
    predictor = Predictor(CostModel(), bindings)

    def key(name: str, op: Op) -> CostKey:
        return predictor.key(bindings.keys(name, op.component), op)

    assert key("dev", DECODE) == key("tuned", DECODE)
    assert bindings.keys("dev", "vae") is bindings.keys("tuned", "vae"), "so their decodes may share a batch"
    assert key("dev", DENOISE) != key("tuned", DENOISE)
    assert key("dev", IMAGE_ENCODE) != key("fill", IMAGE_ENCODE), "Fill encodes two pictures"
    assert predictor.players_of(key("dev", DECODE)) == [Player("dev"), Player("tuned")]
    assert predictor.players_of(key("dev", DENOISE)) == [Player("dev")]


def test_bytes_of_a_module_count_each_tensor_once() -> None:
    linear = torch.nn.Linear(4, 4, bias=False)
    module = torch.nn.ModuleList([linear, linear])
    module.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    assert weight_bytes(module) == 4 * 16 + 8 * 3
