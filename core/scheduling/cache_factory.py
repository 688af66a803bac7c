"""Makes a scheduler's cache. The one place where scheduling names an implementation of its interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.cache.plug_in import ActivationCache
from core.config import CacheConfig, SchedulerConfig
from core.model_info import ModelInfo
from core.scheduling.node_cache import NodeCache
from core.scheduling.predictor import Predictor


def make_cache(
    cache: CacheConfig,
    device_bytes: Sequence[int],
    scheduler: SchedulerConfig,
    models: Mapping[str, ModelInfo],
    predictor: Predictor,
) -> NodeCache:
    """The activation cache with these settings. device_bytes: by rank, device memory for pages."""
    return ActivationCache(cache, device_bytes, models, predictor, scheduler.max_num_seqs)
