"""The edits that benchmarks send: the example picture and mask, prompts in turn, seeds counted up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

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


@dataclass(frozen=True)
class EditSpec:
    """One edit, in the words of both the server and diffusers. num_inference_steps: 1..200. mask_aware: the server may
    skip tokens outside the mask."""

    prompt: str
    seed: int
    num_inference_steps: int
    mask_aware: bool


def edit_specs(first: int, number: int, steps: int, *, mask_aware: bool = True) -> list[EditSpec]:
    """`number` different edits; `first` is the first seed."""
    seeds = range(first, first + number)
    return [EditSpec(PROMPTS[seed % len(PROMPTS)], seed, steps, mask_aware) for seed in seeds]


def openai_client(url: str) -> AsyncOpenAI:
    """The official client, which here never tries again: a failed edit must show."""
    from openai import AsyncOpenAI  # the edits alone are also for machines without it

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@dataclass(frozen=True)
class Done:
    """One edit that came back: seconds at its client, and ms from its prepared images to the worker's first computation
    (the response's own figure)."""

    seconds: float
    queue_ms: float


async def send_edit(client: AsyncOpenAI, spec: EditSpec, image: bytes, mask: bytes) -> Done:
    """Send one edit and wait for its picture. Raises openai.APIError."""
    start = time.perf_counter()
    result = await client.images.edit(
        image=("image.png", image, "image/png"),
        mask=("mask.png", mask, "image/png"),
        prompt=spec.prompt,
        extra_body={
            "seed": spec.seed,
            "num_inference_steps": spec.num_inference_steps,
            "mask_aware": spec.mask_aware,
        },
    )
    if not (result.data and result.data[0].b64_json):
        raise ValueError("the answer holds no picture")
    seconds = time.perf_counter() - start
    return Done(seconds, result.to_dict()["stencil"]["ms"]["queue"])  # type: ignore[index]  # an extra key


async def run_clients(client: AsyncOpenAI, specs: Iterable[EditSpec], concurrency: int) -> list[Done]:
    """So many clients, each sending its next edit when the last one is back."""
    image, mask = IMAGE.read_bytes(), MASK.read_bytes()
    queue, done = iter(specs), list[Done]()

    async def one_client(queue: Iterator[EditSpec]) -> None:
        for spec in queue:
            done.append(await send_edit(client, spec, image, mask))

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one_client(queue))
    return done


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
