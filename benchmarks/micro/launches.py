"""How many launches a step of mask-aware edits makes on a GPU, and how long the host takes for them.

Counted are kernels of Triton and of PyTorch, views and empty tensors left out. Neither the mask's size nor the tokens'
width matters, so the models have all layers of the published ones and next to no width. Timed, by the processor, is one
core that runs PyTorch's operators on tensors of a few tokens and Triton's launcher up to the driver, which is a
stand-in: CUDA's own part comes on top. Needs Triton and no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import command
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from model_executor.kernels.gpu_attention import attend_alike
from model_executor.kernels.gpu_operators import TritonOperators
from model_executor.models.base import Row
from model_executor.models.denoiser import Denoiser
from model_executor.models.flux_transformer import FluxTransformer
from model_executor.models.qwen_transformer import QwenTransformer
from model_executor.models.sd3_transformer import SD3Transformer
from model_executor.page_cache.pages import Pages

BATCHES = (1, 8)
SIDE, ACTIVE, TEXT = 8, 6, 4
"""Tokens of the picture's side, those of the mask, and of the prompt."""
WIDTH, HEAD = 16, 16
CAPABILITY = 90
"""Of the GPU that kernels are compiled for: Hopper."""

_SHAPE = {"attention_head_dim": HEAD, "num_attention_heads": 1, "joint_attention_dim": WIDTH}
MODELS: dict[str, Callable[[], tuple[Any, type[Denoiser]]]] = {
    "FLUX.1-dev": lambda: (
        FluxTransformer2DModel(**_SHAPE, pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(4, 6, 6)),
        FluxTransformer,
    ),
    "Stable Diffusion 3.5 large": lambda: (
        SD3Transformer2DModel(
            **_SHAPE,
            num_layers=38,
            caption_projection_dim=HEAD,
            pooled_projection_dim=WIDTH,
            pos_embed_max_size=SIDE,
            sample_size=2 * SIDE,
            qk_norm="rms_norm",
        ),
        SD3Transformer,
    ),
    "Qwen-Image": lambda: (QwenImageTransformer2DModel(**_SHAPE, axes_dims_rope=(4, 6, 6)), QwenTransformer),
}
"""Of the published number of layers."""


def main(argv: Sequence[str] | None = None) -> None:
    args = command(__doc__, rounds=15).parse_args(argv)
    torch.set_num_threads(1)
    driver = stand_in()
    rows, result = list[tuple[str, str]](), dict[str, Value]({"benchmark": "launches"})
    for name, make in MODELS.items():
        for batch in BATCHES:
            triton, pytorch, seconds = measure(make_step(make, batch), driver, args.rounds)
            rows.append((f"{name}, {batch} edits", f"{triton} + {pytorch} launches, {1e3 * seconds:.1f} ms"))
            key = f"{name.lower().replace(' ', '_')}_{batch}"
            result |= {f"{key}_triton": triton, f"{key}_pytorch": pytorch, f"{key}_ms": 1e3 * seconds}
    print_report("launches of a step, Triton's and PyTorch's, and the host's time", rows, result, args.output)


class StandIn:
    """What Triton's launcher needs of a driver. launches: of compiled kernels, which do nothing."""

    def __init__(self, target: object) -> None:
        self.launches = 0
        self.utils = self
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        return self._target

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return self._launch

    def load_binary(self, *kernel: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spilled ones, most threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        """There is none."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def _launch(self, *_: object) -> None:
        self.launches += 1


def stand_in() -> StandIn:
    """In the place of Triton's driver in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    standing = StandIn(GPUTarget("cuda", CAPABILITY, 32))
    driver.set_active(standing)
    return standing


@torch.inference_mode()
def make_step(make: Callable[[], tuple[Any, type[Denoiser]]], batch: int) -> Callable[[], object]:
    """A step of so many edits between two keyframes."""
    from model_executor.kernels import triton_kernels

    module, denoiser_class = make()
    module = module.bfloat16().eval().requires_grad_(False)
    denoiser = denoiser_class(module, 1000, TritonOperators(triton_kernels).attending(attend_alike))
    rows = [_edit(denoiser) for _ in range(batch)]
    return lambda: denoiser.forward(rows)


def _edit(denoiser: Denoiser) -> Row:
    layout = denoiser.page_layout("int8")
    entries = torch.zeros(2, layout.entry_bytes(SIDE**2), dtype=torch.uint8)
    pooled, sigma = torch.zeros(WIDTH, dtype=torch.bfloat16), torch.tensor(0.6)
    return Row(
        latents=torch.zeros(SIDE**2, denoiser.module.config.in_channels * _patch(denoiser) ** 2, dtype=torch.bfloat16),
        condition=torch.zeros(SIDE**2, 0, dtype=torch.bfloat16),
        prompt_embeds=torch.zeros(TEXT, WIDTH, dtype=torch.bfloat16),
        pooled_prompt_embeds=pooled,
        sigma=sigma,
        guidance_scale=3.5,
        grid=(SIDE, SIDE),
        active=torch.arange(ACTIVE),
        pages=Pages(layout, SIDE**2, entries[0], entries[1], 0.3),
        modulation=denoiser.modulation(pooled, 3.5, sigma[None], 1),
    )


def _patch(denoiser: Denoiser) -> int:
    """Latent pixels of a token's side that the module itself makes a token of."""
    return denoiser.module.config.patch_size if isinstance(denoiser, SD3Transformer) else 1


class Counter(TorchDispatchMode):
    """Counts PyTorch's operators that would launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" not in func.name() and not _is_view(func._schema.returns):
            self.launches += 1
        return out


def _is_view(returns: Iterable[Any]) -> bool:
    """Whether an operator's results are parts of what it was given, unchanged."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@torch.inference_mode()
def measure(step: Callable[[], object], driver: StandIn, rounds: int) -> tuple[int, int, float]:
    """Launches of Triton's and of PyTorch's kernels, and median seconds of processor time."""
    step()
    driver.launches = 0
    with Counter() as counter:
        step()
    triton = driver.launches
    seconds = medians({"step": timed(step, time.process_time)}, rounds, warm_ups=0)["step"]
    return triton, counter.launches, seconds


if __name__ == "__main__":
    main()
