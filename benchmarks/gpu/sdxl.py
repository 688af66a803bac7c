"""Stable Diffusion XL's UNet with random weights: a guided step and a whole warm edit, against diffusers' own UNet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.autoencoder import Autoencoder
from benchmarks.gpu.bench import COMPILE_SECONDS, Bench, Call
from benchmarks.gpu.boxes import middle_box, tokens_in
from benchmarks.gpu.sizes import SdxlSize
from benchmarks.micro.rows import pages_between, primed_entry, unet_row
from model_executor.kernels.operators import best_operators
from model_executor.models.unet import Unet

TOKEN = 32  # pixels of a token's side
ROUNDS = 3  # of whole edits
BOTH_SECONDS = 150.0
"""With less time left diffusers' blocks are not compiled, but ours, which a bar is about."""


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Steps and whole edits, ours and eager diffusers in turns; then diffusers and our blocks compiled."""
    sdxl, put = Sdxl(bench), partial(bench.report.put, "sdxl")
    size = sdxl.size
    steps = {"diffusers": sdxl.diffusers(), "exact": sdxl.exact(), "masked": sdxl.masked()}
    seconds = bench.medians(steps)
    bound = Sdxl(replace(bench, device=torch.device("meta"))).bound()
    put(ratio=size.ratio, steps=size.steps, bound=bound)
    put(**{f"{name}_ms": 1e3 * taken for name, taken in seconds.items()})
    put(launch_ms=bench.launch_ms(steps["masked"]))
    vae = Autoencoder(bench, size.autoencoder, size.side * TOKEN)
    decode_box = vae.decode_box(sdxl.active, size.side)

    def edit(step: Call, decode: Call) -> Call:
        return lambda: [vae.encode(), *(step() for _ in range(size.steps)), decode()]

    whole = {name: edit(step, decode_box if name == "masked" else vae.decode) for name, step in steps.items()}
    edits = bench.medians(whole, ROUNDS)
    put(**{f"{name}_edit_s": taken for name, taken in edits.items()})
    put(**{f"{name}_graph_ms": bench.graph_ms(steps[name]) for name in ("exact", "masked")})
    if bench.seconds_left >= BOTH_SECONDS:
        sdxl.module.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=bench.size.backend)
        put(diffusers_compiled_ms=1e3 * bench.median(steps["diffusers"]))
        put(diffusers_compiled_edit_s=bench.median(whole["diffusers"], ROUNDS))
    if bench.seconds_left < COMPILE_SECONDS:
        return
    with torch.compiler.set_stance("default" if bench.size.backend == "inductor" else "force_eager"):
        step = sdxl.masked_compiled()
        put(masked_compiled_ms=1e3 * bench.median(step), launch_compiled_ms=bench.launch_ms(step))
        put(masked_compiled_edit_s=bench.median(edit(step, decode_box), ROUNDS))


class Sdxl:
    """One module, run by us and by diffusers: two rows, as classifier-free guidance has them."""

    def __init__(self, bench: Bench) -> None:
        self.size: SdxlSize = bench.size.sdxl
        self.module = bench.make(lambda: UNet2DConditionModel(**self.size.unet_config))
        self._unet, self._bench = Unet(self.module, 1000, TOKEN), bench
        self._box = middle_box(self.size.ratio, self.size.side)
        self.active = tokens_in(self._box, self.size.side, bench.device)
        self._rows = [unet_row(self._unet, self.size.side, self.size.text_tokens, bench.draw) for _ in range(2)]
        self._rows[1] = replace(self._rows[1], latents=self._rows[0].latents)  # both rows are of one request
        self._entries = [primed_entry(self._unet, self._rows[0], sigma) for sigma in (0.75, 0.5)]

    def exact(self) -> Call:
        return lambda: self._unet.forward(self._rows)

    def masked(self) -> Call:
        return self._masked(self._unet)

    def masked_compiled(self) -> Call:
        """As with `--kernels compile`; the module's own blocks are compiled from here on, too."""
        operators = best_operators(self._bench.device).compiling()
        return self._masked(Unet(self.module, 1000, TOKEN, operators))

    def _masked(self, unet: Unet) -> Call:
        near, far = self._entries
        pages = pages_between(unet, self._rows[0], near, far)
        rows = [replace(row, active=self.active, box=self._box, pages=pages) for row in self._rows]
        return lambda: unet.forward(rows)

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
