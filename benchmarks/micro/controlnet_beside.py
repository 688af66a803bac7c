"""A ControlNet on a rank of its own beside its base, against both on one rank, through an engine offline.

SDXL's shape with its widths cut to a fifth (64, 128, 256 channels; 1, 2 and 10 transformers; random weights) and one
ControlNet, under the default policy; each rank has one thread. Both engines take turns; a step's time is that of a
picture less that of one with a single step, median over rounds. `bound`: what two ranks could gain at most. `there`:
the share of residuals that had come when the base's layers asked for them. `copy`: 25 MB from one rank to another in
one message, least time of the sender and of the receiver.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from benchmarks.command import command
from benchmarks.micro.counted_parts import FILE
from benchmarks.micro.unet_step import CONFIGS
from benchmarks.report import print_report
from core.config import ControlNetConfig, ModelConfig
from core.ipc.peer_sockets import Inboxes, PeerSockets
from core.run_class import RunClass
from core.sampling_params import SamplingParams
from entrypoints import ControlPicture, Edit, ImageEngine
from tools.random_unet_checkpoints import make_sdxl

SHAPE = CONFIGS["sdxl"] | {
    "block_out_channels": (64, 128, 256),
    "attention_head_dim": (1, 2, 4),
    "layers_per_block": 2,
    "in_channels": 4,
    "out_channels": 4,
    # As `make_sdxl` has them.
    "cross_attention_dim": 48,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 72,
}
SETTLING = 10.0
"""Seconds in which idle ranks load what they have been told to."""
COPIED = 25 * 2**20  # bytes: residuals of FLUX.1 at 1,024 px in bfloat16


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, steps=8, rounds=5)
    parser.add_argument("--side", type=int, default=384, help="of the pictures, in pixels")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILE] = f"{folder}/parts"
        make_checkpoint(Path(folder), args.side)
        seconds, are_equal = step_seconds(Path(folder), args.side, args.steps, args.rounds)
        parts = Path(os.environ[FILE]).read_bytes()
    (one, two), (sent, received) = seconds, copy_seconds(args.rounds)
    bound = speedup_bound(args.side)
    result = {
        "one_rank_ms": one * 1e3,
        "two_ranks_ms": two * 1e3,
        "speedup": one / two,
        "bound": bound,
        "there": parts.count(b"1") / max(1, len(parts)),
        "num_parts": len(parts),
        "copy_sent_ms": sent * 1e3,
        "copy_received_ms": received * 1e3,
        "are_equal": are_equal,
    }
    rows = [(name, f"{value:.3f}" if isinstance(value, float) else str(value)) for name, value in result.items()]
    print_report("a step with a ControlNet beside its base", rows, result, args.output)


def make_checkpoint(folder: Path, side: int) -> None:
    torch.manual_seed(0)
    make_sdxl(folder / "model", native_size=side)
    unet = UNet2DConditionModel(**(SHAPE | {"sample_size": side // 8}))
    unet.save_pretrained(folder / "model" / "unet")
    ControlNetModel.from_unet(unet, load_weights_from_unet=False).save_pretrained(folder / "net")


def step_seconds(folder: Path, side: int, steps: int, rounds: int) -> tuple[tuple[float, float], bool]:
    """((seconds of a step on one rank, on two), whether the pictures are equal)."""
    net = ControlNetConfig("net", str(folder / "net"))
    model = ModelConfig(model=str(folder / "model"), controlnets=(net,), dtype="float32", threads=1)
    counts = RunClass(name="counts", path="benchmarks.micro.counted_parts:CountedParts")
    picture = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    edit = Edit(prompt="a hat", size=(side, side), controls=[ControlPicture(picture)])
    found: list[list[float]] = [[], []]
    with ExitStack() as stack:
        options: dict[str, Any] = {"models": [model], "image_workers": 1, "classes": (counts,)}
        engines = [stack.enter_context(ImageEngine(workers_per_engine=number, **options)) for number in (1, 2)]
        for each in engines:
            seconds_of(each, edit, steps)
            time.sleep(SETTLING)
            seconds_of(each, edit, steps)
        for _ in range(rounds):
            for engine, times in zip(engines, found, strict=True):
                (least, _), (most, _) = seconds_of(engine, edit, 1), seconds_of(engine, edit, steps)
                times.append((most - least) / (steps - 1))
        pictures = [seconds_of(engine, edit, 2)[1] for engine in engines]
    one, two = (statistics.median(times) for times in found)
    return (one, two), np.array_equal(*pictures)


def seconds_of(engine: ImageEngine, edit: Edit, steps: int) -> tuple[float, Any]:
    """(seconds, picture)"""
    started = time.perf_counter()
    (result,) = engine.generate([edit], SamplingParams(num_inference_steps=steps, seed=1), use_tqdm=False)
    if result.error is not None:
        raise result.error
    return time.perf_counter() - started, np.asarray(result.images[0])


def speedup_bound(side: int) -> float:
    """Time of ControlNet and base, over that of the longer one: processor time of diffusers' modules, whose control
    picture is embedded already.
    """
    torch.set_num_threads(1)
    unet = UNet2DConditionModel(**(SHAPE | {"sample_size": side // 8})).eval()
    net = ControlNetModel.from_unet(unet, load_weights_from_unet=False).eval()
    net.controlnet_cond_embedding = torch.nn.Identity()
    latents, text = torch.randn(1, 4, side // 8, side // 8), torch.randn(1, 12, 48)
    added = {"text_embeds": torch.randn(1, 24), "time_ids": torch.zeros(1, 6)}
    control = torch.rand(1, 64, side // 8, side // 8)
    times: list[tuple[float, float]] = []
    with torch.inference_mode():
        for _ in range(4):
            started = time.process_time()
            net(latents, 1, text, control, added_cond_kwargs=added)
            between = time.process_time()
            unet(latents, 1, text, added_cond_kwargs=added)
            times.append((between - started, time.process_time() - between))
    of_net, of_base = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return float((of_net + of_base) / max(of_net, of_base))


def copy_seconds(rounds: int) -> tuple[float, float]:
    """(seconds to send 25 MB, to receive and read them once), least over rounds."""
    inboxes, data = Inboxes(2), np.random.default_rng(0).integers(0, 256, COPIED, np.uint8)
    ranks = [PeerSockets(ends[0], ends[1:]) for ends in map(inboxes.ends_of, range(2))]
    found: list[tuple[float, float]] = []
    for _ in range(max(rounds, 5)):
        started = time.perf_counter()
        ranks[0].post(1, b"header", [data])
        sent = time.perf_counter()
        _, received = ranks[1].receive()
        torch.from_numpy(received).view(torch.int64).sum()
        found.append((sent - started, time.perf_counter() - sent))
    for rank in ranks:
        rank.close()
    inboxes.close()
    return min(sent for sent, _ in found), min(received for _, received in found)


if __name__ == "__main__":
    main()
