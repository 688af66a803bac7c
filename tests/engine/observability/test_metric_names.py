"""Every exported metric is in docs/observability.md and on the dashboard, and neither names anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.costs.load_report import CacheStats, EngineStats, LoadReport, StepSample
from engine.observability.metrics import STAGES, Metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "stencil.json").read_text())
NOT_SHOWN: frozenset[str] = frozenset()
"""Metrics that are no panel's."""

TARGET_LABELS = {"instance", "job"}  # Prometheus' own
LOAD = LoadReport(num_received=0, num_running=0, num_waiting=0)
CACHE = CacheStats(
    hits={"host": 0},
    misses=0,
    primed=0,
    evictions={"host": 0},
    loads={"disk": 0},
    failed_loads=0,
    failed_stores=0,
    entries={"host": 0},
    used_bytes={"host": 0},
    budget_bytes={"host": 0},
    load_seconds=0.0,
)
STATS = EngineStats(
    op_seconds={},
    ranks=(),
    r_squared={"denoise": 1.0},
    steps=1,
    batch_tokens=0,
    batch_requests=0,
    tokens_skipped=0,
    prime_chunks=0,
    busy_seconds={"denoise": 0.0},
    recent_steps=(StepSample(1, 1, 0.1, 0.1, 0.1),),
    cache=CACHE,
)


@dataclass(frozen=True)
class Exported:
    """A metric as a scraper sees it. samples: names of its series."""

    type: str
    labels: frozenset[str]
    samples: frozenset[str]


def exported() -> dict[str, Exported]:
    """All metrics of a server that has done everything once, by name, with a counter's suffix _total."""
    metrics = Metrics()
    metrics.watch_queue(lambda: 0, lambda: 0)
    images = SimpleNamespace(num_waiting=0, num_running=0, num_deaths=0, num_retries=0, result_bytes=0)
    metrics.watch_image_processors(images, lambda: 0.0)
    metrics.watch_states(SimpleNamespace(used_bytes=0, num_recalled=0))
    metrics.expect(["m"], 1)
    metrics.observe_load(0, LOAD, STATS)
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.type == "gauge" and family.name.endswith("_created"):
            continue
        name = family.name + "_total" * (family.type == "counter")
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        labels = frozenset(label for sample in samples for label in sample.labels) - {"le"}
        found[name] = Exported(family.type, labels, frozenset(sample.name for sample in samples))
    return found


METRICS = exported()
OURS = {name.removeprefix("stencil:"): metric for name, metric in METRICS.items() if name.startswith("stencil:")}


# --------------------------------------------------------------------------------------------------------- the table


def documented() -> Iterator[tuple[str, str, frozenset[str]]]:
    """(name, type, labels) of each metric in the table."""
    text = (DOCS / "observability.md").read_text()
    table = text[text.index("| metric |") : text.index("Gateways such as")]
    for line in table.splitlines()[2:]:
        if line:
            names, kind, labels, _ = line.strip("| ").replace("| |", "|  |").split("|", 3)
            for name in re.findall(r"`(\w+)`", names):
                yield name, kind.strip(), frozenset(re.findall(r"`(\w+)`", labels))


def test_the_table_is_what_is_exported() -> None:
    table = list(documented())
    assert len(table) == len({name for name, _, _ in table})
    assert {name: (kind, labels) for name, kind, labels in table} == {
        name: (metric.type, metric.labels) for name, metric in OURS.items()
    }


def test_the_table_names_label_values() -> None:
    text = (DOCS / "observability.md").read_text()
    for value in ("queue_full", "not_ready", "shutting_down", "invalid", "unauthorized", "stop", "abort", *STAGES):
        assert f"`{value}`" in text


def test_what_gateways_look_for() -> None:
    text = (DOCS / "observability.md").read_text()
    names = {name for name in METRICS if name.startswith("vllm:")}
    assert names == {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:lora_requests_info"}
    assert all(name in text for name in names)


# --------------------------------------------------------------------------------------------------------- dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return variables + [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_what_is_exported(query: str) -> None:
    samples = {sample: metric for metric in METRICS.values() for sample in metric.samples}
    names = re.findall(r"(?:stencil|vllm):\w+", query)
    assert names
    asked = set().union(*(samples[name].labels for name in names)) | TARGET_LABELS | {"le"}
    selectors = re.findall(r"(\w+)\s*=~?\"", query)
    groups = [label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", group)]
    variables = re.findall(r"label_values\([^,]+, (\w+)\)", query)
    assert {*selectors, *groups, *variables} <= asked
    for name in names:  # a selector that a series does not have would find none
        (selector,) = set(re.findall(rf"{re.escape(name)}\{{([^}}]*)\}}", query)) or {""}
        assert set(re.findall(r"(\w+)=~?\"", selector)) <= samples[name].labels | TARGET_LABELS


def test_every_metric_is_shown() -> None:
    samples = {sample: name for name, metric in METRICS.items() for sample in metric.samples}
    shown = {samples[name] for query in queries() for name in re.findall(r"stencil:\w+", query)}
    assert {name for name in METRICS if name.startswith("stencil:")} - shown == NOT_SHOWN


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            if "by (" in target["expr"] or "sum(" in target["expr"]:
                assert labels <= kept, target["expr"]


def test_panels_use_the_data_source_that_is_chosen() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    first = DASHBOARD["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    for panel in panels():
        assert panel["datasource"] == chosen
        assert [target["datasource"] for target in panel["targets"]] == [chosen] * len(panel["targets"])
        assert panel["title"]
        assert panel["description"].endswith(".")


def test_panels_lie_side_by_side() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in covered) < 24
        assert not covered & cells, panel["title"]
        cells |= covered
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_what_exists_from_the_start() -> None:
    """Series with known label values are there before anything happens, so that a rate sees their first count."""
    metrics = Metrics()
    metrics.expect(["m"], 2)
    text = metrics.exposition().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    late = {name for name, family in families.items() if not family.samples}
    tiers = {field for field in msgspec.structs.asdict(CACHE) if isinstance(getattr(CACHE, field), dict)}
    assert late == {f"stencil:cache_{field}" for field in tiers} | {"stencil:cost_model_r_squared"}
