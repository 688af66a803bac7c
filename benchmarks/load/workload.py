"""The example picture with its mask, and prompts."""

from __future__ import annotations

import os
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMAGE = EXAMPLES / "person.png"
MASK = EXAMPLES / "person_mask.png"
PROMPTS = (
    "a red striped shirt",
    "a blue plain sweater",
    "a green checked coat",
    "a yellow dotted shirt",
    "a purple plain shirt",
    "an orange striped sweater",
)


def prompt(number: int) -> str:
    """PROMPTS in turn."""
    return PROMPTS[number % len(PROMPTS)]


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
