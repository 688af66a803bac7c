"""VideoLoad: videos of several resolutions as DDiT serves them, with the speeds of their steps by degree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

DATA = Path(__file__).parent / "data" / "ddit.json"

TOKENS = {"144p": 144, "240p": 399, "360p": 900}
"""In proportion to the pixels: what tells sizes apart."""


class Arrival(NamedTuple):
    """One request."""

    seconds: float
    name: str  # of its class


class VideoLoad(msgspec.Struct, frozen=True):
    """Times by class: 144p, 240p, 360p."""

    steps: int
    service_seconds: dict[str, float]  # of a whole request on one device
    decode_share: dict[str, float]  # of these, of decoding
    speed: dict[str, dict[int, float]]  # of steps by degree, as a multiple of one device's
    decode_speed: float  # of decoding on any number of devices, as a multiple of one device's
    mixes: tuple[tuple[float, ...], ...]  # shares of the classes

    @classmethod
    def read(cls, path: Path = DATA) -> VideoLoad:
        """The published numbers, and the assumed ones."""
        raw = msgspec.json.decode(path.read_bytes())
        return cls(
            steps=raw["workload"]["steps"],
            service_seconds=_of_classes(raw["service_seconds_at_degree_1"]),
            decode_share=_of_classes(raw["vae_share_at_degree_1"]),
            speed={
                name: {int(degree): speed for degree, speed in of.items()}
                for name, of in _of_classes(raw["dit_speedup_by_degree"]).items()
            },
            decode_speed=raw["vae_speedup_by_degree"]["value"],
            mixes=tuple(tuple(mix) for mix in raw["mixes"]["value"]),
        )

    def step_seconds(self, name: str, degree: int) -> float:
        """Of one step."""
        return self.service_seconds[name] * (1 - self.decode_share[name]) / self.steps / self.speed[name][degree]

    def decode_seconds(self, name: str) -> float:
        return self.service_seconds[name] * self.decode_share[name] / self.decode_speed

    def request_seconds(self, name: str, degree: int) -> float:
        """Of a whole request on one group of devices."""
        return self.steps * self.step_seconds(name, degree) + self.decode_seconds(name)

    def arrivals(self, mix: Sequence[float], number: int, rate: float, seed: int) -> list[Arrival]:
        """Poisson arrivals. rate: requests per second; 0: all come at once."""
        random, now, drawn = Random(seed), 0.0, list[Arrival]()
        for _ in range(number):
            now += random.expovariate(rate) if rate else 0.0
            drawn.append(Arrival(now, random.choices(list(TOKENS), mix)[0]))
        return drawn


class Assumed(NamedTuple):
    """One assumed number, and the loads with half and twice of it."""

    name: str
    half: VideoLoad
    twice: VideoLoad


def assumed(load: VideoLoad) -> Iterator[Assumed]:
    """Every number of the load that the paper's text does not state and that does not follow from it. Of a speed half
    and twice the gain (or loss) against half as many devices is taken.
    """
    for name in load.service_seconds:
        yield Assumed(f"service seconds of {name}", *(_with_service(load, name, factor) for factor in (0.5, 2.0)))
    for name in ("144p", "240p"):
        yield Assumed(f"decode share of {name}", *(_with_share(load, name, factor) for factor in (0.5, 2.0)))
    for name, degree in ASSUMED_SPEEDS:
        if load.speed[name][degree] == load.speed[name][degree // 2]:
            continue  # half and twice of no gain are the same
        yield Assumed(f"gain of {name} at degree {degree}", *(_with_gain(load, name, degree, f) for f in (0.5, 2.0)))


ASSUMED_SPEEDS = (("144p", 2), ("144p", 4), ("144p", 8), ("240p", 4), ("240p", 8), ("360p", 2), ("360p", 8))
"""Those of `dit_speedup_by_degree` in the file that its source does not state."""


def _with_service(load: VideoLoad, name: str, factor: float) -> VideoLoad:
    seconds = load.service_seconds | {name: load.service_seconds[name] * factor}
    return msgspec.structs.replace(load, service_seconds=seconds)


def _with_share(load: VideoLoad, name: str, factor: float) -> VideoLoad:
    return msgspec.structs.replace(load, decode_share=load.decode_share | {name: load.decode_share[name] * factor})


def _with_gain(load: VideoLoad, name: str, degree: int, factor: float) -> VideoLoad:
    """A speed is at most the degree. Gains at higher degrees stay, up to one that is not assumed."""
    speed, higher = dict(load.speed[name]), degree
    more = (factor - 1) * (speed[degree] - speed[degree // 2])
    while (name, higher) in ASSUMED_SPEEDS:
        speed[higher] = min(speed[higher] + more, float(higher))
        higher *= 2
    return msgspec.structs.replace(load, speed=load.speed | {name: speed})


def _of_classes(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in TOKENS}
