"""GET /v1/engine/stats: what the engine knows of itself, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from core.messages import CacheStats, LoadReport, ModelInfo
from engine.async_engine import AsyncEngine


def engine_stats(engine: AsyncEngine) -> dict[str, Any]:
    """The queue, the engine's last load report, its cache and cost model, the templates and the models. What is not
    known yet, or not there, is null.
    """
    load = engine.load
    return {
        "object": "engine.stats",
        "queue": _queue(engine),
        "load": None if load is None else _load(load),
        "cost_model": None if load is None else {"r_squared": load.r_squared},
        "cache": None if load is None or load.cache is None else _cache(load.cache),
        "templates": _templates(engine),
        "models": [_model(model) for model in engine.models.values()],
    }


def _queue(engine: AsyncEngine) -> dict[str, Any]:
    return {
        "running": engine.num_requests_running,
        "waiting": engine.num_requests_waiting,
        "admitted": engine.num_admitted,
        "limit": engine.config.max_queue,
    }


def _load(load: LoadReport) -> dict[str, Any]:
    fields = msgspec.to_builtins(load)
    for elsewhere in ("type", "cache", "r_squared"):
        fields.pop(elsewhere, None)
    return dict(fields)


def _cache(stats: CacheStats) -> dict[str, Any]:
    """hit_ratio: entries found on any tier / entries asked for; null before the first one."""
    hits = sum(stats.hits.values())
    asked = hits + stats.misses
    return {"hit_ratio": hits / asked if asked else None} | dict(msgspec.to_builtins(stats))


def _templates(engine: AsyncEngine) -> dict[str, Any]:
    templates = engine.templates
    return {"count": len(templates), "used_bytes": templates.used_bytes, "budget_bytes": templates.budget}


def _model(model: ModelInfo) -> dict[str, Any]:
    fields = dict(msgspec.to_builtins(model))
    return {"id": fields.pop("name")} | fields
