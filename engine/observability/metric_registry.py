"""MetricRegistry: creates Prometheus collectors with the prefix ``stencil:`` and exports them in text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

PREFIX = "stencil:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricRegistry:
    """Each instance has its own collectors, so that two engines in one process (tests, offline use) share none."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Exported as ``stencil:<name>_total``."""
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str, prefix: str = PREFIX) -> Gauge:
        return Gauge(prefix + name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self._registry)

    def watched_counter(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A counter kept by other code; `value` is called at each scrape."""
        self._registry.register(_WatchedCounter(PREFIX + name, text, value))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)


class _WatchedCounter(Collector):
    def __init__(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._name, self._text, self._value = name, text, value

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._value())
