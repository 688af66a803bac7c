"""Scenario: a fleet and its load; SCENARIOS by name; `make_trace` draws the edits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.simulation.machine import IMAGE_TOKENS, SCHEME, TEXT_TOKENS, Machine
from benchmarks.simulation.masks import MASKS
from core.config import CacheConfig
from core.graph.workflows.inpaint import INPAINT
from core.handles import ArrayRef, Artefact
from core.messages.engine import EngineRequest, PrimeTemplate
from core.messages.specs import EditSpec
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams

MODEL = ModelInfo(
    name="m",
    family="flux-fill",
    native_size=1024,
    token_size=16,
    latent_width=64,
    max_text_tokens=TEXT_TOKENS,
    default_num_inference_steps=28,
    default_guidance_scale=30.0,
    has_guidance=True,
    has_true_cfg=False,
    device="cuda",
    dtype="bfloat16",
    page_scheme=SCHEME,
)

SIDE = 1024  # px

PIXELS = ArrayRef(0, 0, (SIDE, SIDE, 3), "uint8")
_MASK = ArrayRef(0, 0, (SIDE, SIDE), "uint8")


@dataclass(frozen=True)
class Scenario:
    """num_ranks: of each engine. ranks: the same, where engines differ. load: share of `capacity`. burstiness: shape of
    the Gamma distribution of the times between arrivals; 1 is a Poisson process, less comes in bursts. num_templates:
    drawn by a Zipf law of exponent `zipf`; where they are warm, all are primed on every engine before the first edit.
    num_warm_up: edits before those that are counted. learns: the cost model goes on learning from every batch.
    """

    name: str
    num_engines: int = 8
    num_ranks: int = 1
    ranks: tuple[int, ...] = ()
    max_num_seqs: int = 8
    load: float = 0.8
    burstiness: float = 1.0
    masks: str = "reference"
    steps: tuple[int, ...] = (28,)
    num_edits: int = 4000
    num_warm_up: int = 0
    num_templates: int = 1
    zipf: float = 1.0
    is_warm: bool = True
    learns: bool = False
    machine: Machine = field(default_factory=Machine)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(host_bytes=16 * 10**9))

    @property
    def capacity(self) -> float:
        """Edits per second that all engines together can do at most: always max_num_seqs edits in a step, all pages
        there.
        """
        machine = self.machine
        tokens = TEXT_TOKENS + IMAGE_TOKENS * float(MASKS[self.masks](np.random.default_rng(0), 200_000).mean())
        step = machine.step / self.max_num_seqs + machine.token * tokens
        alone = machine.text_encode + machine.image_encode + machine.decode
        seconds = sum(self.steps) / len(self.steps) * step + alone
        return sum(self.engine_ranks) * machine.speed / seconds

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """The number of ranks of each engine."""
        return self.ranks or (self.num_ranks,) * self.num_engines


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
"""A server without caching, batching or masks."""

_SAME_RATE = replace(REFERENCE, name="same-rate", masks="production", num_edits=2000)
SAME_RATE = replace(_SAME_RATE, load=ONE_AT_A_TIME.load * ONE_AT_A_TIME.capacity / _SAME_RATE.capacity)
"""Mask-aware and batched, at the rate that nearly fills ONE_AT_A_TIME."""

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
    "ranks-1-4": replace(REFERENCE, name="ranks-1-4", ranks=(1, 4) * 4, load=0.65, num_edits=2000),
    "fleet-32": replace(REFERENCE, name="fleet-32", num_engines=32, num_edits=2000),
    "fleet-256": replace(REFERENCE, name="fleet-256", num_engines=256, num_edits=6000),
    "decision-8": replace(MIX, name="decision-8", num_edits=400, num_warm_up=0, learns=True),
    "decision-64": replace(
        MIX, name="decision-64", num_engines=64, ranks=(1, 4) * 32, num_edits=2000, num_warm_up=0, learns=True
    ),
    "decision-256": replace(
        MIX, name="decision-256", num_engines=256, num_edits=4000, num_warm_up=0, load=0.85, learns=True
    ),
    "decision-512": replace(MIX, name="decision-512", num_engines=512, num_edits=2000, num_warm_up=0, learns=True),
}


def make_trace(scenario: Scenario, seed: int) -> list[EngineRequest]:
    """The edits in the order they come; the same seed draws the same."""
    random = np.random.default_rng(seed)
    number = scenario.num_warm_up + scenario.num_edits
    shape, mean = scenario.burstiness, 1.0 / (scenario.load * scenario.capacity)
    arrivals = random.gamma(shape, mean / shape, number).cumsum().tolist()
    active = np.ceil(MASKS[scenario.masks](random, number) * IMAGE_TOKENS).astype(int).tolist()
    steps = random.choice(scenario.steps, number).tolist()
    weights = 1.0 / np.arange(1, scenario.num_templates + 1) ** scenario.zipf
    templates = random.choice(scenario.num_templates, number, p=weights / weights.sum()).tolist()
    drawn = zip(arrivals, active, steps, templates, strict=True)
    return [edit_of(index, *values) for index, values in enumerate(drawn)]


def prime_template(template: int) -> PrimeTemplate:
    """A registration that has this template's pages made."""
    return PrimeTemplate(f"prime {template}", MODEL.name, PIXELS, SIDE, SIDE, str(template), IMAGE_TOKENS, 0.0)


def edit_of(index: int, arrival: float, active: int, steps: int, template: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(index),
        model=MODEL.name,
        arrival=arrival,
        workflow=INPAINT.name,
        rounds=(steps,),
        spec=EditSpec(
            prompt="",
            sampling=SamplingParams(num_inference_steps=steps, guidance_scale=30.0, seed=0, full_steps=0),
            width=SIDE,
            height=SIDE,
            template=PIXELS,
            mask=_MASK,
            active=ArrayRef(0, 0, (active,), "int32"),
            content_id=str(template),
            num_tokens=IMAGE_TOKENS,
            max_text_tokens=TEXT_TOKENS,
            outputs={"picture": Artefact(PIXELS)},
            is_mask_aware=True,
        ),
    )
