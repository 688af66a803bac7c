"""Makes a scheduler's cache. The one place where scheduling names an implementation of its interface."""

from __future__ import annotations

from collections.abc import Mapping

from core.cache.plug_in import ActivationCache
from core.config import CacheConfig, SchedulerConfig
from core.model_info import ModelInfo
from core.scheduling.node_cache import NodeCache
from core.scheduling.predictor import Predictor


def make_cache(
    cache: CacheConfig, scheduler: SchedulerConfig, models: Mapping[str, ModelInfo], predictor: Predictor
) -> NodeCache:
    """The activation cache with these settings."""
    return ActivationCache(cache, models, predictor, scheduler.max_num_seqs)
