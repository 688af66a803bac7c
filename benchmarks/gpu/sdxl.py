"""Stable Diffusion XL's UNet with random weights against diffusers' own: guided steps, and edits with the VAE apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.autoencoder import Autoencoder
from benchmarks.gpu.bench import Bench, Call, rotating
from benchmarks.gpu.boxes import box_at, middle_box, tokens_in
from benchmarks.gpu.graphs import GraphSwitch
from benchmarks.gpu.sizes import SdxlSize
from benchmarks.micro.rows import PAGES, pages_between, primed_entry, unet_row
from core.cache.page_reservations import bracket
from model_executor.models.base import Row
from model_executor.models.boxes import Box
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import Pages

TOKEN = 32  # pixels of a token's side
ROUNDS = 2  # of the steps of whole edits
PLACES = ROUNDS + 1
"""Edits in turn, each with a mask in another place: of a UNet each place is a graph of its own."""


@torch.inference_mode()
def run(bench: Bench, sdxl: Sdxl) -> None:
    """Steps: ours eagerly and as a CUDA graph, and eager diffusers, in turns. Then the steps of whole edits, with
    graphs that are captured when an edit needs them, and the VAE apart."""
    put, size = partial(bench.report.put, "sdxl"), sdxl.size
    bound = Sdxl(replace(bench, device=torch.device("meta"))).bound()
    put(ratio=size.ratio, steps=size.steps, bound=bound)
    steps = {"exact": sdxl.exact(), "masked": sdxl.masked()}
    calls: dict[str, Call] = {"diffusers": sdxl.diffusers()}
    calls |= {name: sdxl.switch.eager(call) for name, call in steps.items()}
    if sdxl.switch.works:
        graphs = {f"{name}_graph": sdxl.switch.replayed(call) for name, call in steps.items()}
        for call in graphs.values():  # a shape's first step warms kernels, the second is captured
            call()
            call()
        calls |= graphs
    put(**{f"{name}_ms": 1e3 * taken for name, taken in bench.medians(calls).items()})
    put(launch_ms=bench.launch_ms(calls["masked"]))
    sdxl.switch.set(True)
    runs = {"diffusers": sdxl.diffusers_run(), "exact": sdxl.exact_run(), "masked": sdxl.masked_runs(PLACES)}
    edits = bench.medians(runs, ROUNDS)
    put(**{f"{name}_run_s": taken for name, taken in edits.items()}, graphs=sdxl.switch.figures())
    vae = Autoencoder(bench, size.autoencoder, size.side * TOKEN)
    decodes = {"decode": vae.decode, "decode_box": vae.decode_box(sdxl.active, size.side)}
    parts = bench.medians({"encode": vae.encode, **decodes})
    put(**{f"{name}_ms": 1e3 * taken for name, taken in parts.items()})
    for name, taken in edits.items():
        put(**{f"{name}_edit_s": taken + parts["encode"] + parts["decode_box" if name == "masked" else "decode"]})


class Sdxl:
    """One module, run by us and by diffusers: two rows, as classifier-free guidance has them."""

    def __init__(self, bench: Bench) -> None:
        self.size: SdxlSize = bench.size.sdxl
        self.module = bench.make(lambda: UNet2DConditionModel(**self.size.unet_config))
        self._unet, self._bench = Unet(self.module, 1000, TOKEN), bench
        self.switch = GraphSwitch(self._unet, bench.graphs)
        self._box = middle_box(self.size.ratio, self.size.side)
        self.active = tokens_in(self._box, self.size.side, bench.device)
        self._rows = [unet_row(self._unet, self.size.side, self.size.text_tokens, bench.draw) for _ in range(2)]
        self._rows[1] = replace(self._rows[1], latents=self._rows[0].latents)  # both rows are of one request

    def exact(self) -> Call:
        return lambda: self._unet.forward(self._rows)

    def masked(self) -> Call:
        """A step between two keyframes."""
        near, far = (primed_entry(self._unet, self._rows[0], sigma) for sigma in (0.75, 0.5))
        pages = pages_between(self._unet, self._rows[0], near, far)
        rows = [replace(row, active=self.active, box=self._box, pages=pages) for row in self._rows]
        return lambda: self._unet.forward(rows)

    def exact_run(self) -> Call:
        """All steps of an edit that computes every token."""
        steps = [self._at(sigma) for sigma in self._sigmas()]
        return lambda: [self._unet.forward(rows) for rows in steps]

    def masked_runs(self, number: int) -> Call:
        """All steps of an edit, in turn with its mask at `number` places."""
        entries = [primed_entry(self._unet, self._rows[0], keyframe) for keyframe in self._keyframes()]
        return rotating([self._masked_run(box_at(n, self.size.ratio, self.size.side), entries) for n in range(number)])

    def _masked_run(self, box: Box, entries: Sequence[Tensor]) -> Call:
        keyframes, active = self._keyframes(), tokens_in(box, self.size.side, self._bench.device)
        layout = self._unet.page_layout(PAGES)
        steps = [(bracket(keyframes, sigma), self._at(sigma)) for sigma in self._sigmas()]

        def run() -> None:
            for around, rows in steps:
                near, *far = (entries[keyframes.index(keyframe)] for keyframe in around.keyframes)
                pages = Pages(layout, self.size.image_tokens, near, far[0] if far else None, around.weight)
                self._unet.forward([replace(row, active=active, box=box, pages=pages) for row in rows])

        return run

    def _at(self, sigma: float) -> list[Row]:
        level = torch.tensor(sigma, device=self._bench.device)
        return [replace(row, sigma=level) for row in self._rows]

    def _sigmas(self) -> list[float]:
        return [1 - step / self.size.steps for step in range(self.size.steps)]

    def _keyframes(self) -> tuple[float, ...]:
        last = self.size.keyframes - 1
        return tuple(1 - number / last for number in range(last + 1))

    def diffusers_run(self) -> Call:
        step = self.diffusers()
        return lambda: [step() for _ in range(self.size.steps)]

    def diffusers(self) -> Call:
        """The module's own forward of both rows."""
        side = 4 * self.size.side
        inputs: dict[str, Any] = {
            "sample": self._bench.draw(2, self.module.config.in_channels, side, side),
            "timestep": torch.tensor(500, device=self._bench.device),
            "encoder_hidden_states": torch.stack([row.prompt_embeds for row in self._rows]),
            "added_cond_kwargs": {
                "text_embeds": torch.stack([row.pooled_prompt_embeds for row in self._rows]),
                "time_ids": self._bench.draw(2, 6),
            },
            "return_dict": False,
        }
        return lambda: self.module(**inputs)

    def bound(self) -> float:
        """Floating-point operations of an exact step over those of a mask-aware one; needs a module on the meta device,
        since those of a CPU's own layers are not counted."""
        counts = []
        for call in (self.exact(), self.masked()):
            with FlopCounterMode(display=False) as counter:
                call()
            counts.append(counter.get_total_flops())
        return float(counts[0] / counts[1])
