"""Numbers: sizes and times of LegoDiffusion's workflows, as the paper states them or as they are assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

DATA = Path(__file__).parent.parent / "data" / "lego.json"


class Workflow(NamedTuple):
    """One of the paper's: a base model with so many ControlNets."""

    base: str
    num_nets: int

    @property
    def name(self) -> str:
        return f"{self.base}+cn{self.num_nets}" if self.num_nets else self.base

    @property
    def nets(self) -> tuple[str, ...]:
        """Names of its ControlNets."""
        return tuple(f"cn{number}" for number in range(1, self.num_nets + 1))


class Numbers(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in GB (1e9 bytes)."""

    bases: dict[str, tuple[str, ...]]  # setting -> its base models
    families: dict[str, str]  # base model -> whose text encoders and VAE it shares
    steps: dict[str, int]
    solo_seconds: dict[str, float]  # base model -> all steps, on one device
    gigabytes: dict[str, float]  # base model, "text_encoder FAMILY" or "vae" -> size
    controlnet_gigabytes_share: dict[str, float]  # of its base's size
    controlnet_seconds_share: dict[str, float]  # of its base's time
    load_gigabytes_per_second: float
    device_gigabytes: float
    batch_slope: float  # a batch of b requests takes 1 - slope + slope * b times that of one
    speed_of_two: float  # of a step on two devices
    encode_seconds: float
    decode_seconds: float
    node_seconds: float  # that each run of a node takes longer where nodes are scheduled on their own
    jitter: float  # batches take up to this share more or less
    most_rounds: int = 7  # that a request's steps are simulated in: between two of them policies decide again

    @classmethod
    def read(cls, path: Path = DATA) -> Numbers:
        raw = msgspec.json.decode(path.read_bytes())
        return cls(
            bases={name: tuple(bases) for name, bases in _values(raw["settings"])},
            **{name: _value(raw[name]) for name in cls.__struct_fields__ if name in raw},
        )

    def workflows(self, setting: str) -> list[Workflow]:
        """The workflows of a setting, in the paper's order."""
        return [Workflow(base, number) for base in self.bases[setting] for number in range(3)]

    def rounds(self, base: str) -> int:
        """Rounds of a request's steps."""
        return min(self.steps[base], self.most_rounds)

    def round_seconds(self, base: str, number: int, degree: int) -> float:
        """The time that one round of this number of requests takes on so many devices."""
        alone = self.solo_seconds[base] / self.rounds(base)
        return self._batch(alone, number, degree) + self._overhead(base)

    def control_seconds(self, base: str, num_nets: int, number: int, degree: int) -> float:
        """The time that so many ControlNets take for a round of this number of requests."""
        alone = self.solo_seconds[base] * self.controlnet_seconds_share[base] / self.rounds(base)
        return num_nets * self._batch(alone, number, degree) + self._overhead(base)

    def encoding_seconds(self, number: int) -> float:
        """Of so many prompts."""
        return self._batch(self.encode_seconds, number, 1) + self.node_seconds

    def _batch(self, alone: float, number: int, degree: int) -> float:
        speed = self.speed_of_two if degree > 1 else 1.0
        return alone * (1 - self.batch_slope + self.batch_slope * number) / speed

    def _overhead(self, base: str) -> float:
        return self.node_seconds * self.steps[base] / self.rounds(base)

    def alone_seconds(self, workflow: Workflow) -> float:
        """Of a request that has one device to itself, everything loaded, as a whole: what objectives count."""
        steps = self.solo_seconds[workflow.base]
        nets = workflow.num_nets * self.controlnet_seconds_share[workflow.base]
        return self.encode_seconds + steps * (1 + nets) + self.decode_seconds

    def components(self, workflow: Workflow) -> dict[str, float]:
        """Name of each component of a workflow -> its size. Those of equal names are shared."""
        base, family = workflow.base, self.families[workflow.base]
        encoder = f"text_encoder {family}"
        net = self.controlnet_gigabytes_share[base] * self.gigabytes[base]
        return {
            encoder: self.gigabytes[encoder],
            base: self.gigabytes[base],
            f"vae {family}": self.gigabytes["vae"],
            **{f"{base} {name}": net for name in workflow.nets},
        }


ASSUMED = (
    "solo_seconds",
    "device_gigabytes",
    "load_gigabytes_per_second",
    "controlnet_seconds_share",
    "controlnet_gigabytes_share",
    "batch_slope",
    "encode_seconds",
    "decode_seconds",
    "node_seconds",
    "jitter",
)
"""Numbers that are assumed in part or altogether."""


def varied(numbers: Numbers, name: str, factor: float) -> Numbers:
    """The same with one number multiplied. Batches never take less than one request, or more than one by one."""
    value: Any = getattr(numbers, name)
    if isinstance(value, dict):
        changed: Any = {key: factor * each for key, each in value.items()}
    else:
        changed = min(1.0, factor * value) if name == "batch_slope" else factor * value
    return msgspec.structs.replace(numbers, **{name: changed})


def described(numbers: Numbers) -> Iterator[str]:
    """The numbers that are assumed, in words."""
    for name in ASSUMED:
        yield f"  {name.replace('_', ' ')}: {getattr(numbers, name)}"


def _values(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in section.items() if name != "source")


def _value(section: dict[str, Any]) -> Any:
    return section["value"] if "value" in section else dict(_values(section))
