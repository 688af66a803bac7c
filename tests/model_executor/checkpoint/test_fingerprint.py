"""Fingerprints of checkpoints, and the page scheme that results from flags, calibration and defaults."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from core.calibration import CALIBRATION, Calibration, calibration_file
from core.config import EMBEDDED_MODEL, ModelConfig
from core.errors import InvalidRequestError
from core.page_scheme import PageScheme
from core.sampling_params import SamplingParams
from model_executor.checkpoint import file_hashes
from model_executor.checkpoint.fingerprint import fingerprint
from model_executor.checkpoint.hub import INDEX
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.page_schemes import with_calibration
from model_executor.models.families.flux import FluxFill

FOUND = Calibration(
    keyframes=(1.0, 0.25, 0.0),
    dtype="bfloat16",
    full_steps=2,
    full_steps_from=0.3,
    mask_margin=16,
    safe=True,
    ssim_mean=0.98,
    ssim_p10=0.96,
    num_edits=16,
    num_inference_steps=28,
)


@pytest.fixture
def path(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "stencil"


def opened(path: Path, dtype: str = "float32") -> ModelCheckpoint:
    return ModelCheckpoint.open(ModelConfig(model=str(path), dtype=dtype, device="cpu"))


def weights_of(path: Path) -> Path:
    return next((path / "transformer").glob("*.safetensors"))


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_equal_files_elsewhere_have_the_same_fingerprint(tiny_checkpoint: Path, path: Path, cache: Path) -> None:
    assert fingerprint(opened(path), cache) == fingerprint(opened(tiny_checkpoint), cache)


def test_weights_configuration_tokenizer_and_dtype_count(path: Path, cache: Path) -> None:
    prints = [fingerprint(opened(path), cache), fingerprint(opened(path, "bfloat16"), cache)]
    for part in (weights_of(path), path / "transformer" / "config.json", path / "tokenizer" / "tokenizer.json"):
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
        prints.append(fingerprint(opened(path), cache))
    assert len(set(prints)) == 5


def test_parts_that_the_index_leaves_out_count(path: Path, cache: Path) -> None:
    """Their files stay, as when SD3 is served without T5."""
    index = json.loads((path / INDEX).read_text())
    prints = []
    for changes in ({}, {"text_encoder_2": None}, {"_diffusers_version": "0.1", "_name_or_path": "elsewhere"}):
        (path / INDEX).write_text(json.dumps(index | changes))
        prints.append(fingerprint(opened(path), cache))
    assert prints[0] != prints[1]
    assert prints[0] == prints[2]


def test_how_an_empty_prompt_is_embedded_counts(path: Path, cache: Path) -> None:
    """Templates are primed with one. What is usual counts as where nothing is said, and other entries never do."""
    index = json.loads((path / INDEX).read_text())
    prints = []
    for changes in ({}, {"force_zeros_for_empty_prompt": False}, {"force_zeros_for_empty_prompt": True, "note": 1}):
        (path / INDEX).write_text(json.dumps(index | changes))
        prints.append(fingerprint(opened(path), cache))
    assert prints[0] != prints[1]
    assert prints[0] == prints[2]


def test_the_chat_template_counts(path: Path, cache: Path) -> None:
    """In a file of its own, as newer tokenizers have it. Prompts are read by it, also the one for priming."""
    before = fingerprint(opened(path), cache)
    (path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert fingerprint(opened(path), cache) != before


def test_hashes_of_weights_are_remembered(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(opened(path), cache)
    hashed = list[Path]()
    real = file_hashes._sha256

    def spy(file: Path) -> str:
        hashed.append(file)
        return real(file)

    monkeypatch.setattr(file_hashes, "_sha256", spy)
    assert fingerprint(opened(path), cache) == first
    assert [file for file in hashed if file.suffix == ".safetensors"] == []
    os.utime(weights_of(path), ns=(1, 1))
    assert fingerprint(opened(path), cache) == first
    assert [file for file in hashed if file.suffix == ".safetensors"] == [weights_of(path).resolve()]


def test_the_file_of_hashes_is_accessible_to_its_owner_only(path: Path, cache: Path) -> None:
    fingerprint(opened(path), cache)
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"/a": {"size": "x"}}', b"\xff\xfe"])
def test_a_damaged_file_of_hashes_is_replaced(path: Path, cache: Path, content: bytes) -> None:
    first = fingerprint(opened(path), cache)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    assert fingerprint(opened(path), cache) == first
    assert file.read_bytes() == good


def test_the_fingerprint_is_the_same_if_hashes_cannot_be_saved(path: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fingerprint(opened(path), tmp_path / "file") == fingerprint(opened(path), cache)


def test_file_names_of_the_hubs_cache_are_used_as_hashes(path: Path, cache: Path, tmp_path: Path) -> None:
    before = fingerprint(opened(path), cache)
    weights = weights_of(path)
    blob = tmp_path / file_hashes._sha256(weights)
    weights.rename(blob)
    weights.symlink_to(blob)
    assert fingerprint(opened(path), cache) == before
    blob.write_bytes(blob.read_bytes() + b" ")  # not looked at
    assert fingerprint(opened(path), cache) == before


# --------------------------------------------------------------------------------------------------------- page schemes


def scheme_of(path: Path, cache: Path, **flags: str | bool) -> PageScheme | None:
    config = ModelConfig(model=str(path), dtype="float32", device="cpu", **flags)  # type: ignore[arg-type]
    checkpoint = ModelCheckpoint.open(config)
    family = FluxFill(checkpoint)
    for part in ("transformer",):
        family.put(part, family.prepare(part, checkpoint.load(part)))
    return with_calibration(family.info("tiny"), config, checkpoint, family, cache).page_scheme


def given(path: Path, calibration: Calibration) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(calibration))


def test_keys_change_with_the_number_of_threads(path: Path, cache: Path) -> None:
    schemes = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 1):
            torch.set_num_threads(num_threads)
            schemes.append(scheme_of(path, cache))
    finally:
        torch.set_num_threads(before)
    one, two, again = schemes
    assert one is not None
    assert two is not None
    assert one == again
    assert one.template_key("picture") != two.template_key("picture")
    assert one.fingerprint == two.fingerprint


def test_defaults(path: Path, cache: Path) -> None:
    scheme = scheme_of(path, cache)
    assert scheme is not None
    assert scheme.keyframes == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert (scheme.layout.dtype, scheme.full_steps, scheme.mask_margin, scheme.prompt) == ("int8", 0, 8, "")
    assert scheme.fingerprint == fingerprint(opened(path), cache)
    assert scheme.latent_bytes == 64 * torch.float32.itemsize


def test_a_calibration_sets_what_flags_leave_open(path: Path, cache: Path) -> None:
    given(path / CALIBRATION, FOUND)
    scheme = scheme_of(path, cache)
    assert scheme is not None
    assert scheme.keyframes == (1.0, 0.25, 0.0)
    assert (scheme.layout.dtype, scheme.full_steps, scheme.mask_margin) == ("bfloat16", 2, 16)
    assert (scheme.full_steps_of, scheme.full_steps_from) == (28, 0.3)
    flagged = scheme_of(path, cache, cache_keyframes="2", cache_dtype="float32")
    assert flagged is not None
    assert flagged.keyframes == (1.0, 0.0)
    assert (flagged.layout.dtype, flagged.full_steps, flagged.mask_margin) == ("float32", 2, 16)


def test_full_steps_are_counted_in_calls_of_the_model(path: Path, cache: Path) -> None:
    """As in the calibration's edits: Heun's method calls the model twice at most noise levels."""
    given(path / CALIBRATION, FOUND)
    config = ModelConfig(model=str(path), dtype="float32", device="cpu")
    checkpoint = ModelCheckpoint.open(config)
    family = FluxFill(checkpoint)
    family.put("transformer", family.prepare("transformer", checkpoint.load("transformer")))
    heun = msgspec.structs.replace(family.info("tiny"), solver_order=2)
    scheme = with_calibration(heun, config, checkpoint, family, cache).page_scheme
    assert scheme is not None
    calls = heun.num_steps(SamplingParams(num_inference_steps=FOUND.num_inference_steps))
    assert calls == 55
    assert scheme.full_steps_at(0.5, calls) == FOUND.full_steps


def test_pages_at_every_step(path: Path, cache: Path) -> None:
    flagged = scheme_of(path, cache, cache_keyframes="per-step")
    assert flagged is not None
    assert flagged.keyframes == ()
    given(path / CALIBRATION, msgspec.structs.replace(FOUND, keyframes="per-step"))
    found = scheme_of(path, cache)
    assert found is not None
    assert found.keyframes == ()


def test_the_users_calibration_overrides_the_checkpoints(path: Path, cache: Path) -> None:
    given(path / CALIBRATION, FOUND)
    given(
        calibration_file(cache, fingerprint(opened(path), cache)), msgspec.structs.replace(FOUND, keyframes=(1.0, 0.0))
    )
    scheme = scheme_of(path, cache)
    assert scheme is not None
    assert scheme.keyframes == (1.0, 0.0)


def test_an_unsafe_checkpoint_is_served_exactly_and_says_so(
    path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given(path / CALIBRATION, msgspec.structs.replace(FOUND, safe=False, ssim_p10=0.71))
    with caplog.at_level(logging.WARNING):
        assert scheme_of(path, cache) is None
    (record,) = caplog.records
    assert "only SSIM 0.710" in record.getMessage()
    assert scheme_of(path, cache, cache_keyframes="9") is not None


def test_without_mask_aware_execution_there_is_no_page_scheme(path: Path, cache: Path) -> None:
    assert scheme_of(path, cache, mask_aware=False) is None
    assert not cache.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"keyframes": [0.5, 1.0]}', msgspec.json.encode(FOUND)[:-1] + b',"x":1}']
)
def test_an_invalid_calibration_is_ignored(
    path: Path, cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (path / CALIBRATION).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        scheme = scheme_of(path, cache)
    assert scheme is not None
    assert len(scheme.keyframes) == 5
    assert "is left out" in caplog.records[0].getMessage()


@pytest.mark.parametrize("keyframes", [(), (1.0,), (0.0, 1.0), (1.0, 0.5), (1.0, 0.5, 0.5, 0.0)])
def test_keyframes_that_do_not_fall_from_1_to_0_are_no_calibration(keyframes: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must fall from 1 to 0"):
        msgspec.structs.replace(FOUND, keyframes=keyframes)


@pytest.mark.parametrize(
    ("flag", "value"), [("cache_keyframes", "1"), ("cache_keyframes", "many"), ("cache_dtype", "int3")]
)
def test_impossible_flags_are_refused(path: Path, cache: Path, flag: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=value):
        scheme_of(path, cache, **{flag: value})


def test_the_embedded_models_large_masks_get_a_full_step() -> None:
    """Small masks get none, since a full step costs as much as several of theirs."""
    found = msgspec.json.decode((Path(EMBEDDED_MODEL) / CALIBRATION).read_bytes(), type=Calibration)
    assert found.safe
    assert found.full_steps == 1
    assert 0.15 < found.full_steps_from < 1 / 3
