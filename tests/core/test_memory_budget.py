"""The device memory that is left for pages: within every limit, with an error that names the remedy."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import CacheConfig
from core.errors import ConfigError
from core.handles import LoadedComponent, ModelKey
from core.memory_budget import DeviceMemory, Room, at_one_time, bytes_to_come, check_fits, describe, page_bytes

GIB = 1024**3
H200 = DeviceMemory(total=140 * GIB, taken=34 * GIB, peak=7 * GIB, kept=GIB, free=105 * GIB)


def test_pages_get_what_is_left_of_the_share() -> None:
    assert page_bytes(H200, 0.9, least=7 * GIB) == (126 - 34 - 8) * GIB
    assert page_bytes(H200, 0.5, least=7 * GIB) == (70 - 34 - 8) * GIB


def test_memory_that_others_use_is_not_for_pages() -> None:
    crowded = msgspec.structs.replace(H200, free=40 * GIB)
    assert page_bytes(crowded, 0.9, least=7 * GIB) == 32 * GIB


@given(
    st.integers(GIB, 200 * GIB),
    st.integers(0, 200 * GIB),
    st.integers(0, 50 * GIB),
    st.integers(0, 5 * GIB),
    st.integers(0, 200 * GIB),
    st.floats(0.01, 1.0),
    st.integers(1, 10 * GIB),
)
def test_no_limit_is_passed(total: int, taken: int, peak: int, kept: int, free: int, share: float, least: int) -> None:
    memory = DeviceMemory(total=total, taken=taken, peak=peak, kept=kept, free=free)
    try:
        pages = page_bytes(memory, share, least)
    except ConfigError:
        room = min(int(total * share) - taken - peak, free - peak) - kept
        assert room < least + 1024**2, "it would have fitted"
        return
    assert pages >= least
    assert pages + peak + kept + taken <= total * share
    assert pages + peak + kept <= free


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            DeviceMemory(total=24 * GIB, taken=23 * GIB, peak=GIB, kept=0, free=GIB),
            ["the model takes 23.00 GiB", "--max-num-seqs", "--quantization", "--gpu-memory-utilization 0.9"],
        ),
        (
            DeviceMemory(total=140 * GIB, taken=34 * GIB, peak=8 * GIB, kept=0, free=9 * GIB),
            ["other programs", "9.00 GiB"],
        ),
    ],
)
def test_without_memory_left_the_error_names_the_remedy(memory: DeviceMemory, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        page_bytes(memory, 0.9, least=7 * GIB)
    message = str(raised.value)
    assert "\n" not in message
    assert "7.00 GiB" in message
    assert all(word in message for word in words), message


def test_the_log_shows_how_memory_is_used() -> None:
    assert describe(H200, 84 * GIB) == (
        "device memory: 140.00 GiB, of which the model takes 34.00 GiB, its largest batch 7.00 GiB, graphs of "
        "steps 0.00 GiB, what requests keep between their steps 1.00 GiB, pages 84.00 GiB"
    )


def test_weights_that_are_loaded_later_keep_their_room() -> None:
    later = msgspec.structs.replace(H200, to_come=20 * GIB)
    assert page_bytes(later, 0.9, least=7 * GIB) == (126 - 34 - 8 - 20) * GIB
    assert "1.00 GiB, weights that are loaded later 20.00 GiB, pages 64.00 GiB" in describe(later, 64 * GIB)


def component(kind: str, gibibytes: int, content: str = "0f") -> LoadedComponent:
    return LoadedComponent(ModelKey(content, kind), gibibytes * GIB)


FLUX = [component("text_encoder", 1, "clip"), component("transformer", 22), component("text_encoder", 8, "t5")]


def test_weights_that_do_not_fit_are_told_with_the_arithmetic() -> None:
    room = Room.of_device(24 * GIB, 0.5)
    assert not room.has(FLUX)
    assert room.has(FLUX[:1])
    assert room.why_not("flux", FLUX) == (
        "flux does not fit: its weights take 31.00 GiB (transformer 22.00 GiB, text_encoder 9.00 GiB), and there may "
        "be 12.00 GiB (24.00 GiB x --gpu-memory-utilization 0.5); keep text encoders and VAE in host memory (--offload "
        "host), quantise the denoiser (--quantization), take a smaller --dtype, or give weights more memory"
    )
    offloaded = room.why_not("flux", FLUX[1:], elsewhere=FLUX[:1])
    assert offloaded == (
        "flux does not fit: its weights take 30.00 GiB (transformer 22.00 GiB, text_encoder 8.00 GiB) while 1.00 GiB "
        "are in host memory (--offload host), and there may be 12.00 GiB (24.00 GiB x --gpu-memory-utilization 0.5); "
        "quantise the denoiser (--quantization), take a smaller --dtype, or give weights more memory"
    )
    assert Room.of_offloaded(8 * GIB, 2).why_not("flux", FLUX[2:]) == (
        "flux does not fit: its weights take 8.00 GiB (text_encoder 8.00 GiB), and there may be 4.00 GiB (all memory "
        "of the host, shared by 2 workers); take a smaller --dtype, or leave --offload host out"
    )
    beside = Room.of_host(32 * GIB).why_not("flux", FLUX[1:2], [component("unet", 12)])
    assert beside == (
        "flux does not fit: its weights take 22.00 GiB (transformer 22.00 GiB), and models hold 12.00 GiB of 32.00 GiB "
        "(all memory here); serve fewer models, or have them take turns (--model-bytes)"
    )


CLIP, TRANSFORMER, T5 = (each.key for each in FLUX)
VAE = component("vae", 3, "vae")


def test_of_what_comes_in_turn_the_largest_set_counts() -> None:
    with_vae = [*FLUX, VAE]
    assert at_one_time(with_vae, []) == with_vae
    assert at_one_time(with_vae, [{CLIP, T5}, {VAE.key}, set()]) == [FLUX[1], FLUX[0], FLUX[2]]
    assert at_one_time(with_vae, [{CLIP}, {VAE.key}]) == [FLUX[1], FLUX[2], VAE]
    assert at_one_time(with_vae, [{T5}, {CLIP, T5}]) == [FLUX[1], VAE, FLUX[0], FLUX[2]], "one is in two sets"
    assert at_one_time([], [{T5}]) == []


def test_weights_that_come_in_turn_are_not_loaded_later() -> None:
    """With another model its denoiser is, and what is larger of its largest set than of those that are measured."""
    loaded, others = [*FLUX, VAE], [component("transformer", 5, "b"), component("text_encoder", 11, "c")]
    in_turn = [{CLIP, T5}, {VAE.key}, {others[1].key}]
    sizes = [*loaded, *others]
    assert bytes_to_come(sizes, loaded, 0, in_turn) == (5 + 11 - 9) * GIB
    assert bytes_to_come(sizes, loaded, 24 * GIB, in_turn) == (2 + 11 - 9) * GIB, "denoisers have the whole budget"


def test_a_budget_is_refused_with_the_arithmetic() -> None:
    keys = {"flux": [each.key for each in FLUX]}
    check_fits(keys, FLUX, 31 * GIB)
    arithmetic = r"flux alone take \d+ \(transformer 22.00 GiB, text_encoder 9.00 GiB\); give"
    with pytest.raises(ConfigError, match=arithmetic):
        check_fits(keys, FLUX, 31 * GIB - 1)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_the_share_must_be_between_zero_and_one(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        CacheConfig(gpu_memory_utilization=share)
