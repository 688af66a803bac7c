"""The scenarios that `benchmarks.simulate` knows by name."""

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
    cache=CacheConfig(device_bytes=48 * 10**9, host_bytes=192 * 10**9),
)
"""Of 300 templates, 4.4 GB each, an engine's device holds 10 and its host memory 43, cold at the start."""

SCENARIOS: dict[str, Scenario] = {
    "reference": REFERENCE,
    "mix": MIX,
    "mix-busy": replace(MIX, name="mix-busy", load=0.8),
    "reference-calm": replace(REFERENCE, name="reference-calm", load=0.6),
    "production": replace(REFERENCE, name="production", masks="production"),
    "public": replace(REFERENCE, name="public", masks="public"),
    "tryon": replace(REFERENCE, name="tryon", masks="tryon"),
    "bursty": replace(REFERENCE, name="bursty", burstiness=0.25, load=0.6),
    **{f"fleet-{n}": replace(REFERENCE, name=f"fleet-{n}", num_engines=n, num_edits=40 * n) for n in (32, 256)},
    **{f"mix-{n}": replace(MIX, name=f"mix-{n}", num_engines=n, num_edits=40 * n) for n in (32, 256)},
    "control-plane": replace(
        MIX, name="control-plane", num_engines=256, num_edits=3000, num_warm_up=1500, load=0.55, learns=True
    ),
}
