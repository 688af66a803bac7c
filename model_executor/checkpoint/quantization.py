"""Quantised weights: the denoiser's are made by diffusers while it is loaded, others come so with the checkpoint.

Which packages can do it, what each is told, and what becomes of the layers afterwards. Neither package is a dependency:
they are imported when something is quantised.
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
from model_executor.kernels.linear import has_onednn, is_plain, onednn_product

QUANTIZED = ("transformer", "unet")
"""The parts whose linear layers are quantised on demand: denoisers. Convolutions stay as they are."""

INSTALL = {"torchao": "pip install 'stencil-serve[quantization]'", "bitsandbytes": "pip install bitsandbytes"}
"""Package -> how it is had. What else diffusers knows has not been tried."""


def check_wish(wish: Quantization, part: str, stored: str | None, device: torch.device) -> None:
    """part: the denoiser. stored: what its weights are quantised with already. Raises ConfigError for what cannot be
    done."""
    if wish == "none":
        return
    if stored is not None:
        raise ConfigError(
            f"--quantization {wish}: the checkpoint's {part} is quantised with {stored} already, and loads without"
        )
    check_method(wish.partition("-")[0], f"--quantization {wish}", device)


def check_method(method: str, what: str, device: torch.device) -> None:
    """what: for whom. Raises ConfigError for a package that is unknown, missing, or cannot use the device."""
    if method not in INSTALL:
        raise ConfigError(f"{what}, which is not supported; supported: {', '.join(INSTALL)}")
    if method == "bitsandbytes" and device.type != "cuda":
        raise ConfigError(f"{what}: bitsandbytes needs a GPU, and the device is {device.type}")
    if find_spec(method) is None:
        raise ConfigError(f"{what}: the package {method} is not installed; {INSTALL[method]}")


def stored_method(config: Mapping[str, Any]) -> str | None:
    """What a part's weights are quantised with in their files, by its config.json."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return None
    return str(stored.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in stored else "an unknown method"))


def load_options(wish: Quantization, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a part that is quantised, now or already.

    On a GPU layer after layer goes there and is quantised there; what was loaded to a CPU could not always be moved.
    """
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    return options if wish == "none" else options | {"quantization_config": _config(wish, dtype)}


def _config(wish: Quantization, dtype: torch.dtype) -> Any:
    """What diffusers is told."""
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
    """module: as it came from `from_pretrained` with `load_options`. Raises ValueError where all of its linear layers
    are still plain: what was asked for would be ignored without a word."""
    if all(is_plain(layer) for layer in module.modules() if isinstance(layer, nn.Linear)):
        raise ValueError(f"--quantization {wish} has changed none of its layers")


# ------------------------------------------------------------------------------------------------------------- layers


class Int8Linear(nn.Module):
    """torchao's int8 layer, as it is computed on a CPU: input times rows of int8, times each row's scale, plus bias.

    Its formula and memory, but the product is oneDNN's: of 128 rows with 2048 x 2048 weights in float32 it took 6.7 ms
    of processor time where torchao's took 13.3 and oneDNN's with plain weights 5.4. And a row's bits do not depend on
    how many others there are, which with torchao they do.
    """

    qdata: Tensor  # int8 [out, in]
    scale: Tensor  # [out]

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qdata", layer.weight.qdata)
        self.register_buffer("scale", layer.weight.scale.flatten().to(layer.weight.dtype))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        weight = self.qdata.to(x.dtype)
        rows = x.reshape(-1, self.in_features)
        y = onednn_product(rows, weight) if has_onednn(x) else F.linear(rows, weight)
        y = y.mul_(self.scale.to(x.dtype))
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)


def for_device(module: nn.Module, device: torch.device) -> nn.Module:
    """A denoiser as it came from `from_pretrained` with `load_options`, in the form that is fast on this device.
    Other parts look at their layers' weights themselves."""
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        for name, layer in [*module.named_modules()]:
            if type(layer) is nn.Linear and _is_int8(layer.weight):
                module.set_submodule(name, Int8Linear(layer))
    return module


def _is_int8(weight: Any) -> bool:
    """Whether these are torchao's int8 weights with one scale a row, and nothing is done to the input."""
    if type(weight) is nn.Parameter:
        return False
    torchao: Any = importlib.import_module("torchao.quantization")
    return (
        type(weight) is torchao.Int8Tensor
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and weight.scale.numel() == len(weight)
    )


def unquantized(layer: nn.Module) -> nn.Linear:
    """A plain layer as it is; of a quantised one, a plain one of nearly its weights before they were quantised. Raises
    ValueError for one that cannot be undone."""
    if is_plain(layer):
        return layer
    if isinstance(layer, Int8Linear):
        weight = layer.qdata.to(layer.scale.dtype) * layer.scale[:, None]
        return _plain(layer, weight)
    if type(layer) is nn.Linear:
        return _plain(layer, layer.weight.dequantize())
    raise ValueError(f"which is quantised with {type(layer).__module__.partition('.')[0]} and runs as a whole")


def _plain(layer: Any, weight: Tensor) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = layer.bias
    return linear
