"""The scenarios that `benchmarks.simulation` knows by name."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import Scenario
from core.config import CacheConfig

REFERENCE = Scenario("reference")

MIX = Scenario(
    "mix",
    load=0.7,
    steps=(8, 20, 28, 50),
    num_warm_up=1000,
    num_templates=300,
    zipf=1.05,
    is_warm=False,
    machine=Machine(text_encode=0.005, image_encode=0.01, decode=0.02),
    cache=CacheConfig(device_bytes=64 * 10**9, host_bytes=192 * 10**9),
)
"""Of 300 templates, 4.4 GB each, an engine's device holds 14 and its host memory 43, cold at the start."""

ONE_AT_A_TIME = replace(REFERENCE, name="one-at-a-time", masks="whole", max_num_seqs=1, load=0.95, num_edits=2000)
"""What serves edits without caching, batching or masks."""

_SAME_RATE = replace(REFERENCE, name="same-rate", masks="production", num_edits=2000)
SAME_RATE = replace(_SAME_RATE, load=ONE_AT_A_TIME.load * ONE_AT_A_TIME.capacity / _SAME_RATE.capacity)
"""Mask-aware and batched, at the rate that nearly fills those."""

SCENARIOS: dict[str, Scenario] = {
    "reference": REFERENCE,
    "mix": MIX,
    "calm": replace(REFERENCE, name="calm", load=0.65, num_edits=2000),
    "production": replace(REFERENCE, name="production", masks="production", num_edits=2000),
    "public": replace(REFERENCE, name="public", masks="public", num_edits=2000),
    "tryon": replace(REFERENCE, name="tryon", masks="tryon", num_edits=2000),
    "bursty": replace(REFERENCE, name="bursty", burstiness=0.25, load=0.65, num_edits=2000),
    "one-at-a-time": ONE_AT_A_TIME,
    "same-rate": SAME_RATE,
    "two-engines": replace(
        MIX,
        name="two-engines",
        num_engines=2,
        load=0.6,
        steps=(8, 16, 28),
        num_templates=60,
        num_warm_up=60,
        num_edits=300,
        cache=CacheConfig(host_bytes=132 * 10**9),
    ),
    "fleet-32": replace(REFERENCE, name="fleet-32", num_engines=32, num_edits=2000),
    "fleet-256": replace(REFERENCE, name="fleet-256", num_engines=256, num_edits=6000),
    "decision-8": replace(MIX, name="decision-8", num_edits=400, num_warm_up=0, learns=True),
    "decision-256": replace(
        MIX, name="decision-256", num_engines=256, num_edits=4000, num_warm_up=0, load=0.85, learns=True
    ),
}
