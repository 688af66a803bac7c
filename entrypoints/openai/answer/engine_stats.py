"""Builds the JSON object of GET /v1/engine/stats from the engines' statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from core.costs.load_report import (
    CacheStats,
    EngineStats,
    LoadReport,
    QuarantinedModel,
    RankModel,
    RankStats,
    StepSample,
)
from core.handles import LoadedComponent
from core.model_info import ModelInfo
from engine.client.async_engine import AsyncEngine
from engine.observability.engine_metrics import sum_by_key, sum_cache_stats

_LOAD_FIELDS = ("num_received", "num_running", "num_waiting", "base_seconds", "priming_seconds", "drain_seconds")
_TOTAL_FIELDS = (
    "steps",
    "mixed_steps",
    "batch_tokens",
    "batch_requests",
    "tokens_skipped",
    "steps_repeated",
    "prime_chunks",
)


def engine_stats(engine: AsyncEngine, num_steps: int, shown: Callable[[str], str]) -> dict[str, Any]:
    """The queue, each engine, their totals and joint cache, the templates and the models. Unknown or absent values are
    null. num_steps: how many of each engine's last denoising steps to list. shown: an image's id -> the id that the
    caller may see.
    """
    working = [alive or state == "draining" for alive, (state, _) in zip(engine.alive, engine.replicas, strict=True)]
    every = [
        stats if stats is None or works else _of_the_dead(stats)
        for stats, works in zip(engine.stats, working, strict=True)
    ]
    loads = [load if works else None for load, works in zip(engine.loads, working, strict=True)]
    known, models = [stats for stats in every if stats is not None], engine.models
    places = zip(engine.engines, engine.replicas, engine.links, strict=True)
    facts = zip(engine.alive, loads, every, strict=True)
    return {
        "object": "engine.stats",
        "queue": _queue(engine),
        "engines": [
            _place(*place) | _engine(*each, models) | _steps(steps, num_steps, shown)
            for place, each, steps in zip(places, facts, engine.recent_steps, strict=True)
        ],
        "totals": _totals(known),
        "cache": _cache(sum_cache_stats(stats.cache for stats in known)) if any(s.cache for s in known) else None,
        "templates": _templates(engine),
        "models": [_model(name, model) for name, model in models.items()],
    }


def _queue(engine: AsyncEngine) -> dict[str, Any]:
    return {
        "running": engine.num_requests_running,
        "waiting": engine.num_requests_waiting,
        "admitted": engine.num_admitted,
        "limit": engine.config.max_queue,
    }


def _place(index: int, replica: tuple[str, int], link: tuple[str, float, float] | None) -> dict[str, Any]:
    """The engine's number, and where it is; `machine` is null for the server's own, and while it is on none. replica:
    state and restarts. link: machine, seconds since it was heard, and those that a byte takes."""
    state, _ = replica
    machine, silent_seconds = (None, None) if link is None else (link[0], round(link[1], 1))
    return {"index": index, "state": state, "machine": machine, "silent_seconds": silent_seconds}


def _engine(
    alive: bool, load: LoadReport | None, stats: EngineStats | None, models: Mapping[str, ModelInfo]
) -> dict[str, Any]:
    return {
        "alive": alive,
        "load": None if load is None else {field: getattr(load, field) for field in _LOAD_FIELDS},
        "stage_seconds": None if stats is None else stats.op_seconds,
        "models": None if stats is None else stats.models,
        "resident_models": None if stats is None else _components(stats.resident_models, models),
        "ranks": None if stats is None else [_rank(rank, models) for rank in stats.ranks],
        "quarantine": None if stats is None else [_quarantined(each, time.monotonic()) for each in stats.quarantine],
        "totals": None if stats is None else _totals([stats]),
        "cost_model": None if stats is None else {"r_squared": stats.r_squared},
        "cache": None if stats is None or stats.cache is None else _cache(stats.cache),
    }


def _rank(rank: RankStats, models: Mapping[str, ModelInfo]) -> dict[str, Any]:
    return {
        "alive": rank.is_up,
        "deaths": rank.deaths,
        "resident_models": _components(rank.resident_models, models),
        "models": [_rank_model(each, time.monotonic()) for each in rank.models],
        "busy_seconds": rank.busy_seconds,
    }


def _rank_model(each: RankModel, now: float) -> dict[str, Any]:
    """A model on a rank; `idle_seconds` is null before its first step there. now: monotonic seconds."""
    facts = {"model": each.model, "state": each.state, "hits": each.hits, "loads": each.loads, "bytes": each.nbytes}
    return facts | {"idle_seconds": round(max(0.0, now - each.used), 1) if each.used else None}


def _quarantined(each: QuarantinedModel, now: float) -> dict[str, Any]:
    """A model, or ControlNets of one, that the engine refuses. now: monotonic seconds."""
    seconds = {"seconds": round(now - each.since, 1), "seconds_left": round(max(0.0, each.until - now), 1)}
    what = {"model": each.model, "controlnets": list(each.controlnets)}
    return what | {"cause": each.cause, "times": each.times} | seconds


def _components(loaded: Iterable[LoadedComponent], models: Mapping[str, ModelInfo]) -> list[dict[str, Any]]:
    return [
        {
            "component": each.key.component,
            "content": each.key.content,
            "bytes": each.nbytes,
            "models": [name for name, model in models.items() if each.key in model.own and not model.parent],
        }
        for each in loaded
    ]


def _totals(known: Sequence[EngineStats]) -> dict[str, Any]:
    """Sums over the engines; `busy_seconds` is a sum for each stage."""
    totals: dict[str, Any] = {field: sum(getattr(stats, field) for stats in known) for field in _TOTAL_FIELDS}
    return totals | {"busy_seconds": sum_by_key(stats.busy_seconds for stats in known)}


def _steps(steps: Sequence[StepSample], num_steps: int, shown: Callable[[str], str]) -> dict[str, Any]:
    if not num_steps:
        return {}
    now = time.monotonic()
    return {"recent_steps": [_step(sample, now, shown) for sample in steps[-num_steps:]]}


def _step(sample: StepSample, now: float, shown: Callable[[str], str]) -> dict[str, Any]:
    """One denoising step; `ms_ago` counts from its start. now: monotonic seconds."""
    return {
        "ms_ago": round((now - sample.started) * 1e3, 1),
        "ms": round(sample.seconds * 1e3, 3),
        "tokens": sample.num_tokens,
        "degree": sample.degree,
        "requests": [shown(image_id) for image_id in sample.request_ids],
    }


def _of_the_dead(stats: EngineStats) -> EngineStats:
    """The last statistics of a dead engine: counters are kept, and memory, models and predictions are emptied."""
    cache = stats.cache
    if cache is not None:
        cache = msgspec.structs.replace(cache, entries={}, used_bytes={}, budget_bytes={})
    return msgspec.structs.replace(stats, op_seconds={}, ranks=(), models={}, cache=cache)


def _cache(stats: CacheStats) -> dict[str, Any]:
    """`hit_ratio` is entries found on any tier / entries looked up; null before the first look-up."""
    hits = sum(stats.hits.values())
    asked = hits + stats.misses
    return {"hit_ratio": hits / asked if asked else None} | dict(msgspec.to_builtins(stats))


def _templates(engine: AsyncEngine) -> dict[str, Any]:
    templates = engine.templates
    return {"count": len(templates), "used_bytes": templates.used_bytes, "budget_bytes": templates.budget}


def _model(name: str, model: ModelInfo) -> dict[str, Any]:
    """name: that requests give."""
    fields = dict(msgspec.to_builtins(model))
    del fields["name"]
    return {"id": name} | fields
