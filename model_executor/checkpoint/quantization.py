"""Quantised weights: checks and options for the packages that make them, and the layers that run them on a CPU.

Diffusers quantises the denoiser while it loads it, if asked to; other parts may come quantised in the checkpoint. The
packages, torchao and bitsandbytes, are not dependencies: they are imported only when needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import Quantization
from core.errors import ConfigError
from model_executor.kernels.cpu_kernels import Kernels, best_kernels, pack_tiles
from model_executor.kernels.linear import has_onednn, is_plain, onednn_product

QUANTIZED = ("transformer", "unet")
"""The parts whose linear layers are quantised on request: denoisers. Convolutions stay as they are."""

BYTES_PER_WEIGHT: dict[Quantization, float | None] = {
    "none": None,
    "torchao-int8": 1.0,
    "bitsandbytes-8bit": 1.0,
    "bitsandbytes-4bit": 0.5,
}
"""Of a denoiser's weights when they are quantised; None: as of their dtype."""

INSTEAD = (
    "give the bfloat16 checkpoint in the diffusers layout; --quantization torchao-int8 quantises its denoiser while it "
    "is loaded"
)
"""What to do about weights that are quantised in a way that is not read."""

INSTALL = {"torchao": "pip install 'stencil-serve[quantization]'", "bitsandbytes": "pip install bitsandbytes"}
"""Package -> how to install it. Other methods of diffusers have not been tested."""


def check_wish(wish: Quantization, part: str, stored: str | None, device: torch.device) -> None:
    """Raises ConfigError if the denoiser cannot be quantised as asked. part: its name. stored: the method that its
    files are already quantised with."""
    if wish == "none":
        return
    if stored is not None:
        raise ConfigError(
            f"--quantization {wish}: the checkpoint's {part} is quantised with {stored} already, and loads without"
        )
    check_method(wish.partition("-")[0], f"--quantization {wish}", device)


def check_method(method: str, what: str, device: torch.device) -> None:
    """Raises ConfigError for a package that is unknown, missing, or cannot use the device. what: start of the message,
    which names the setting or part that needs it."""
    if method not in INSTALL:
        raise ConfigError(f"{what}, which is not supported; supported: {', '.join(INSTALL)}; {INSTEAD}")
    if method == "bitsandbytes" and device.type != "cuda":
        raise ConfigError(f"{what}: bitsandbytes needs a GPU, and the device is {device.type}")
    if find_spec(method) is None:
        raise ConfigError(f"{what}: the package {method} is not installed; {INSTALL[method]}")


def stored_method(config: Mapping[str, Any]) -> str | None:
    """The method that a part's files are quantised with, from its config.json; None if they are not."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return None
    return str(stored.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in stored else "an unknown method"))


def load_options(wish: Quantization, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a part that is quantised, now or in its files.

    On a GPU, each layer is moved there and then quantised, because layers quantised on a CPU cannot always be moved.
    """
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    return options if wish == "none" else options | {"quantization_config": _config(wish, dtype)}


def _config(wish: Quantization, dtype: torch.dtype) -> Any:
    """diffusers' quantization configuration."""
    configs = importlib.import_module("diffusers.quantizers.quantization_config")
    match wish:
        case "torchao-int8":
            torchao: Any = importlib.import_module("torchao.quantization")
            # By default it also changes the precision of every float32 product of this process.
            return configs.TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
        case "bitsandbytes-8bit":
            return configs.BitsAndBytesConfig(load_in_8bit=True)
        case "bitsandbytes-4bit":
            return configs.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
        case "none":
            raise ValueError("nothing is to be quantised")


def check_quantized(module: nn.Module, wish: Quantization) -> None:
    """Raises ValueError if all linear layers are still plain, so that the request was silently ignored. module: as
    returned by `from_pretrained` with `load_options`."""
    if all(is_plain(layer) for layer in module.modules() if isinstance(layer, nn.Linear)):
        raise ValueError(f"--quantization {wish} has changed none of its layers")


# ------------------------------------------------------------------------------------------------------------- layers


class Int8Linear(nn.Module):
    """A torchao int8 layer for the CPU: input times int8 rows, times each row's scale, plus bias.

    Formula and memory are torchao's, the product is oneDNN's, or once `pack` was called our kernels' with AMX. For 128
    rows and 2048 x 2048 weights in float32 it took 6.7 ms of processor time, torchao's 13.3, and oneDNN's with plain
    weights 5.4. Unlike with torchao, a row's bits do not depend on the number of other rows, with AMX in bfloat16 if it
    is packed.
    """

    qdata: Tensor  # int8 [out, in]; packed: as `pack_tiles` returns it
    scale: Tensor  # [out]

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qdata", layer.weight.qdata)
        self.register_buffer("scale", layer.weight.scale.flatten().to(layer.weight.dtype))
        self.bias = layer.bias
        self.is_packed = False

    def pack(self, kernels: Kernels) -> None:
        """Have the weights in the order that these kernels read, if they multiply its dtype with tiles. It stays with
        the module, also in another process."""
        if not self.is_packed and kernels.order(self.scale.dtype) == "tiles":
            self.qdata, self.is_packed = pack_tiles(self.qdata).data, True  # no view, see `Kernels.pack`

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        weight = self.qdata.to(x.dtype)
        rows = x.reshape(-1, self.in_features)
        y = self._product(rows, weight).mul_(self.scale.to(x.dtype))
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """weight: in the dtype of rows, in the order of `qdata`."""
        if not self.is_packed:
            return onednn_product(rows, weight) if has_onednn(rows) else F.linear(rows, weight)
        kernels = best_kernels()
        if kernels is None or kernels.order(rows.dtype) != "tiles":
            raise RuntimeError(
                f"int8 weights were packed for tiles, and {rows.dtype} is not multiplied with these here: of two "
                "processes one has no compiled kernels, as the log says; start the server again"
            )
        return kernels.linear(rows, weight, weight.new_zeros(self.out_features), gelu=False)


def for_device(module: nn.Module, device: torch.device) -> nn.Module:
    """A denoiser from `from_pretrained` with `load_options`, with its int8 layers replaced by `Int8Linear` on a CPU.
    Not for other parts: their code reads the layers' weights."""
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        for name, layer in [*module.named_modules()]:
            if type(layer) is nn.Linear and _is_int8(layer.weight):
                module.set_submodule(name, Int8Linear(layer))
    return module


def pack_int8(module: nn.Module, kernels: Kernels) -> None:
    """Pack all int8 layers of a denoiser, see `Int8Linear.pack`."""
    for layer in module.modules():
        if isinstance(layer, Int8Linear):
            layer.pack(kernels)


def _is_int8(weight: Any) -> bool:
    """Whether these are torchao's int8 weights with one scale per row, and the input is not quantised or scaled."""
    if type(weight) is nn.Parameter:
        return False
    torchao: Any = importlib.import_module("torchao.quantization")
    return (
        type(weight) is torchao.Int8Tensor
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and weight.scale.numel() == len(weight)
    )
