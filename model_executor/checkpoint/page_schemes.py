"""What a checkpoint's calibration says of a model: its step schedules, and its PageScheme, which says how templates are
cached. The server's flags win over the calibration, and that over defaults.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import torch

from core.calibration import CALIBRATION, Calibration, calibration_file
from core.config import KernelChoice, ModelConfig
from core.errors import ConfigError
from core.model_info import ModelInfo
from core.page_scheme import PageDtype, PageScheme
from core.sampling_params import SamplingParams
from model_executor.checkpoint.fingerprint import fingerprint
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.cpu import cpu_description
from model_executor.kernels.operators import chosen_operators
from model_executor.models.base import Family

logger = logging.getLogger("stencil.worker")

DEFAULT_KEYFRAMES = 5
DEFAULT_DTYPE: PageDtype = "int8"
DEFAULT_FULL_STEPS = 0
DEFAULT_MASK_MARGIN = 8
"""Pixels. These defaults are for checkpoints without a calibration."""

PER_STEP = "per-step"


def with_calibration(
    info: ModelInfo, config: ModelConfig, checkpoint: ModelCheckpoint, family: Family, cache_folder: Path
) -> ModelInfo:
    """The info of a model whose components are loaded, with what its calibration says. Raises ConfigError for invalid
    flags.
    """
    # Reading all weights takes time, which pages need, and else only the users' own calibrations.
    is_hash_needed = (config.mask_aware and info.can_edit) or calibration_file(cache_folder, "").parent.exists()
    checkpoint_hash = fingerprint(checkpoint, cache_folder) if is_hash_needed else ""
    calibration = find_calibration(checkpoint.path, cache_folder, checkpoint_hash)
    schedules = calibration.step_schedules if calibration is not None and info.can_skip_steps else ()
    scheme = _page_scheme(config, checkpoint, family, info, checkpoint_hash, calibration)
    levels = calibration.skip_levels if calibration is not None else ()
    return msgspec.structs.replace(info, page_scheme=scheme, step_schedules=schedules, skip_levels=levels)


def _page_scheme(
    config: ModelConfig,
    checkpoint: ModelCheckpoint,
    family: Family,
    info: ModelInfo,
    checkpoint_hash: str,
    calibration: Calibration | None,
) -> PageScheme | None:
    """None if it is served without mask-aware execution: by flag, because it edits nothing, or because its calibration
    found edits too different and no flag overrides that.
    """
    if not (config.mask_aware and info.can_edit):
        return None
    if calibration is not None and not calibration.safe and not _overrides(config):
        logger.warning(
            "%s: mask-aware edits reached only SSIM %.3f against exact ones when this checkpoint was calibrated, so"
            " every token is computed; --cache-keyframes or --cache-dtype overrides this",
            info.name,
            calibration.ssim_p10,
        )
        return None
    return PageScheme(
        layout=family.page_layout(_dtype(config, calibration)),
        keyframes=_keyframes(config, calibration),
        latent_bytes=info.latent_width * checkpoint.dtype.itemsize,
        fingerprint=checkpoint_hash,
        family=info.family,
        guidance_scale=info.default_guidance_scale,
        prompt=config.priming_prompt,
        mask_margin=DEFAULT_MASK_MARGIN if calibration is None else calibration.mask_margin,
        full_steps=DEFAULT_FULL_STEPS if calibration is None else calibration.full_steps,
        full_steps_of=1 if calibration is None else _num_steps(calibration, info),
        full_steps_from=0.0 if calibration is None else calibration.full_steps_from,
        environment=environment(checkpoint.device, config.kernels, batch_invariant=config.batch_invariant),
    )


def environment(device: torch.device, kernels: KernelChoice = "auto", *, batch_invariant: bool = False) -> str:
    """`PageScheme.environment` of this process as configured now: other threads or kernels sum in another order."""
    digest = chosen_operators(kernels, device, batch_invariant=batch_invariant).digest
    parts = [device.type, _device_name(device), torch.get_num_threads(), torch.__version__, digest]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's description."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_description()


def find_calibration(checkpoint: Path, cache_folder: Path, checkpoint_hash: str) -> Calibration | None:
    """The user's own calibration of a checkpoint, else the one it comes with. Unreadable ones are skipped with a
    warning."""
    for path in (calibration_file(cache_folder, checkpoint_hash), checkpoint / CALIBRATION):
        try:
            return msgspec.json.decode(path.read_bytes(), type=Calibration)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("calibration %s is left out: %s", path, error)
    return None


def uniform_keyframes(number: int) -> tuple[float, ...]:
    """Noise levels spaced evenly from 1 to 0. Raises ValueError for fewer than two."""
    if number < 2:
        raise ValueError(f"pages need at least 2 keyframes, not {number}")
    return tuple(np.linspace(1.0, 0.0, number).tolist())


def _num_steps(calibration: Calibration, info: ModelInfo) -> int:
    """Calls of the model in each edit of a calibration, the unit in which its full steps are counted."""
    return info.num_steps(SamplingParams(num_inference_steps=calibration.num_inference_steps))


def _overrides(config: ModelConfig) -> bool:
    return (config.cache_keyframes, config.cache_dtype) != ("auto", "auto")


def _keyframes(config: ModelConfig, calibration: Calibration | None) -> tuple[float, ...]:
    """Noise levels in descending order; () for pages at every step."""
    match config.cache_keyframes, calibration:
        case "per-step", _:
            return ()
        case "auto", None:
            return uniform_keyframes(DEFAULT_KEYFRAMES)
        case "auto", Calibration(keyframes=keyframes):
            return () if keyframes == PER_STEP else tuple(float(sigma) for sigma in keyframes)
    try:
        return uniform_keyframes(int(config.cache_keyframes))
    except ValueError:
        raise ConfigError(
            f"--cache-keyframes {config.cache_keyframes}: use auto, {PER_STEP} or a number from 2 on"
        ) from None


def _dtype(config: ModelConfig, calibration: Calibration | None) -> PageDtype:
    if config.cache_dtype == "auto":
        return DEFAULT_DTYPE if calibration is None else calibration.dtype
    dtypes: tuple[PageDtype, ...] = get_args(PageDtype)
    for dtype in dtypes:
        if dtype == config.cache_dtype:
            return dtype
    raise ConfigError(f"--cache-dtype {config.cache_dtype}: use auto, {', '.join(dtypes)}")
