"""A GPU that is none, on a machine without one: its tensors say that they are on cuda:0, and lie in host memory.

It raises where a GPU would: where tensors of host and GPU meet in one operator, or a Triton kernel is given one of the
host. It notes where the host waits for the GPU: reads of numbers (`item`, `tolist`, `bool`, `nonzero`, indices that are
masks, copies to the host), `synchronize`, and copies to the GPU that are not queued from pinned memory.

Operators run on the CPU, so numbers are true, except for those of Triton's kernels, which are not run: what these
would write stays as it is, and new memory is zeros.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from model_executor.graphs import cuda_capture
from model_executor.kernels import gpu_attention, gpu_operators, unet_operators

GPU, HOST, META = torch.device("cuda:0"), torch.device("cpu"), torch.device("meta")
ROOT = Path(__file__).parents[1]
OURS = ("model_executor", "core")

NO_THREAD = 0

HOPPER, CUDNN, MEMORY = (9, 0), 92000, 80 * 2**30

aten = torch.ops.aten

WAITS = {
    *(aten.item, aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten.bincount, aten.argwhere),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
"""Operators whose result, or its shape, the host must know."""

REPEATS = (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor)
"""Their results' length is to be known, too, unless it is given."""

MADE_ONCE = (gpu_operators.gpu_operators, gpu_operators._unet_operators)
"""Functions that keep what they have made for a device."""

COPIES = {aten.copy_, aten._foreach_copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
NEW = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class Wait(NamedTuple):
    """The host waits for the GPU, or for a copy that it makes itself."""

    why: str
    where: str  # file:line, function of the innermost frame of ours

    def __str__(self) -> str:
        return f"{self.why} at {self.where}"


class GpuTensor(Tensor):
    """A tensor of the pretended GPU. PyTorch's own code takes it for one without numbers: what it knows of CUDA, a
    build for CPUs lacks."""

    host: Tensor  # its numbers

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> GpuTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=META,
            requires_grad=False,
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        _gpu().waits_for("tolist")
        return self.host.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GpuTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().run(func, args, kwargs or {})


class PretendedGpu(TorchFunctionMode):
    """One GPU. Within it, what is made on the device `cuda:0` or copied to it is a `GpuTensor`. waits: what was noted
    while `watching`."""

    current: ClassVar[PretendedGpu | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self._watched = self._capturing = NO_THREAD  # other threads may copy meanwhile
        self._pinned: dict[int, int] = {}  # address -> the one after the last
        self._kept: list[Tensor] = []  # pinned memory, whose addresses must not be used again

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Waits in the body are noted."""
        self._watched = get_ident()
        try:
            yield
        finally:
            self._watched = NO_THREAD

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Waits, and copies from the host, raise in the body: a graph would repeat them with memory that is gone."""
        self._capturing = get_ident()
        try:
            yield
        finally:
            self._capturing = NO_THREAD

    def waits_for(self, why: str) -> None:
        if self._capturing == get_ident():
            raise RuntimeError(f"{why} while a CUDA graph is captured, at {_our_frame()}")
        if self._watched == get_ident():
            self.waits.append(Wait(why, _our_frame()))

    def on(self, host: Tensor) -> GpuTensor:
        """A tensor of the GPU over this memory."""
        with torch.inference_mode(False):  # a view of a tensor made outside that mode must not be made in it
            return GpuTensor(host)

    # ---------------------------------------------------------------------------------------------- PyTorch's calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        match getattr(func, "__name__", ""):
            case "to" | "cpu" | "cuda" as name:
                return self._to(name, *args, **options)
            case "pin_memory":
                return self._pin(args[0].clone())
            case "is_pinned":
                return self._is_pinned(args[0])
            case "__getitem__" if isinstance(args[0], GpuTensor):
                return args[0][self._key(args[1])]
            case "__setitem__" if isinstance(args[0], GpuTensor):
                x, key, value = args
                x[self._key(key)] = (
                    value if isinstance(value, Tensor) else self.on(torch.full((), value, dtype=x.dtype))
                )
                return None
            case "tensor" | "as_tensor" | "asarray":
                return self._made_of(func, *args, **options)
            case "new_tensor" if isinstance(args[0], GpuTensor):
                return self._to("to", torch.tensor(args[1], dtype=options.get("dtype", args[0].dtype)), GPU)
        if options.pop("pin_memory", False):
            return self._pin(func(*args, **options))
        device = options.get("device")
        if device is not None and not _is_gpu(device):
            return func(*tree_map(_of_host, args), **options)
        if device is not None:
            return tree_map(self._wrapped, func(*args, **options | {"device": HOST}))
        return func(*args, **options)

    def _key(self, key: Any) -> Any:
        """What an index becomes on the GPU: lists are uploaded."""
        if isinstance(key, tuple):
            return tuple(map(self._key, key))
        return self._to("to", torch.tensor(key), GPU) if isinstance(key, list) else key

    def _made_of(self, func: Any, data: Any, *args: Any, **options: Any) -> Tensor:
        """A tensor of numbers, which the host must have."""
        if isinstance(data, GpuTensor):
            return self._to("to", data, options.get("device", GPU), options.get("dtype", data.dtype))
        if any(isinstance(x, GpuTensor) for x in tree_leaves(data)):
            self.waits_for("item")
        device = options.pop("device", HOST)
        made: Tensor = func(tree_map(_of_host, data), *args, **options)
        return self._to("to", made, device)

    def _to(self, name: str, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if name != "to":
            args = (torch.device(name), *args)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        is_copied = options.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **options)
        device = device or x.device
        host, was_there = (x.host, True) if isinstance(x, GpuTensor) else (x, False)
        form = {} if memory_format is None else {"memory_format": memory_format}
        if _is_gpu(device) == was_there:
            made = host.to(HOST if was_there else device, dtype or x.dtype, copy=is_copied, **form)
            return x if made is host else self.on(made) if was_there else made
        if was_there:
            self.waits_for("copy to the host")
            return host.to(device, dtype or x.dtype, copy=True, **form)
        self._note_upload(x, non_blocking)
        return self.on(host.to(HOST, dtype or x.dtype, copy=True, **form))

    def _note_upload(self, x: Tensor, non_blocking: bool) -> None:
        if self._capturing == get_ident():
            raise RuntimeError(f"a copy from the host while a CUDA graph is captured, at {_our_frame()}")
        if not non_blocking or not self._is_pinned(x):
            self.waits_for("copy to the GPU" if non_blocking else "copy to the GPU that is not queued")

    def _pin(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        self.register(x.data_ptr(), x.nbytes)
        return x

    def register(self, address: int, nbytes: int) -> None:
        """Count this host memory as pinned."""
        self._pinned[address] = address + nbytes

    def unregister(self, address: int) -> None:
        del self._pinned[address]

    def _is_pinned(self, x: Tensor) -> bool:
        return any(first <= x.data_ptr() < stop for first, stop in self._pinned.items()) or not x.numel()

    def _wrapped(self, x: Any) -> Any:
        return self.on(x) if isinstance(x, Tensor) and not isinstance(x, GpuTensor) and x.device == HOST else x

    # ---------------------------------------------------------------------------------------------------- operators

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, of whose arguments some are on the GPU."""
        packet = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_host = [x for x in tensors if not isinstance(x, GpuTensor)]
        if packet in COPIES:
            self._note_copies(args, kwargs)
        elif packet in INDEXED:
            self._note_indices(args[1], of_host)
        elif any(x.dim() for x in of_host):
            raise RuntimeError(f"{func} on cpu and cuda, {[tuple(x.shape) for x in tensors]} at {_our_frame()}")
        if packet in WAITS or (func in REPEATS and kwargs.get("output_size") is None):
            self.waits_for(packet.__name__)
        known = {id(x.host): x for x in tensors if isinstance(x, GpuTensor)}
        made = func(*tree_map(_of_host, args), **tree_map(_of_host, dict(kwargs)))
        if packet in NEW and isinstance(made, Tensor) and made.device == HOST:
            made.zero_()  # for the same numbers every time
        if packet is aten.copy_:
            return args[0]
        return tree_map(lambda x: known[id(x)] if id(x) in known else self._wrapped(x), made)

    def _note_copies(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        targets, sources, *rest = (each if isinstance(each, list | tuple) else [each] for each in args)
        (non_blocking,) = rest[0] if rest else (kwargs.get("non_blocking", False),)
        for target, source in zip(targets, sources, strict=True):
            if isinstance(source, GpuTensor) and not isinstance(target, GpuTensor):
                self.waits_for("copy to the host")
            elif isinstance(target, GpuTensor) and not isinstance(source, GpuTensor):
                self._note_upload(source, non_blocking)

    def _note_indices(self, indices: Sequence[Tensor | None], of_host: Sequence[Tensor]) -> None:
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.waits_for("an index that is a mask")
        if of_host:
            self.waits_for("an index, or a value, of the host")


def _gpu() -> PretendedGpu:
    assert PretendedGpu.current is not None, "there is no GPU any more"
    return PretendedGpu.current


def _synchronize(*_: object) -> None:
    if PretendedGpu.current is not None:  # a thread that copies pages may outlive it
        PretendedGpu.current.waits_for("synchronize")


def _of_host(x: Any) -> Any:
    if isinstance(x, GpuTensor):
        return x.host
    return HOST if isinstance(x, torch.device) and x == META else x


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _our_frame() -> str:
    """The innermost frame of ours: path:line, function."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
            return f"{path.relative_to(ROOT)}:{frame.lineno}, {frame.name}"
    return "no code of ours"


# ------------------------------------------------------------------------------------------------------------ the rest


class Stream:
    """All streams are one: what is queued is done at once."""

    device = GPU

    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None:
        _synchronize()

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class Event(Stream):
    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True


class Capture:
    """As `CudaCapture`: a replay runs the pass again, over the same tensors."""

    taken_bytes, is_broken = 0, False

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Any, list[Tensor]]:
        with self._gpu.capturing():
            outputs = run()

        def replay() -> None:
            for output, again in zip(outputs, run(), strict=True):
                output.copy_(again)

        return SimpleNamespace(replay=replay), outputs

    def forget(self) -> None: ...


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """A GPU for the body. PyTorch sees one; a Hopper, with a recent cuDNN."""
    gpu = PretendedGpu()

    def launched(kernel: Any, *args: Any, **constants: Any) -> None:
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, Tensor) and not isinstance(value, GpuTensor):
                raise RuntimeError(f"{name} of {kernel.fn.__name__} is on {value.device}, at {_our_frame()}")

    registered = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: gpu.register(address, nbytes) or 0,
        cudaHostUnregister=gpu.unregister,
    )
    stand_ins: dict[str, Any] = {
        **{"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1},
        **{"current_device": lambda: 0, "set_device": lambda device: None, "synchronize": _synchronize},
        **{"get_device_capability": lambda *_: HOPPER, "get_device_name": lambda *_: "NVIDIA H100"},
        **{"mem_get_info": lambda *_: (MEMORY, MEMORY), "empty_cache": lambda: None, "cudart": lambda: registered},
        **{"get_rng_state": lambda *_: None, "set_rng_state": lambda *_: None, "manual_seed_all": lambda seed: None},
        **{"Stream": Stream, "Event": Event, "stream": lambda stream: nullcontext()},
        **{"current_stream": Stream, "default_stream": Stream},
    }
    with pytest.MonkeyPatch.context() as patch:
        # A module's weights are replaced when it is moved: those there are cannot become tensors of another class.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.backends.cudnn, "version", lambda: CUDNN)
        patch.setattr(gpu_attention, "_capability", lambda device: HOPPER)
        patch.setattr(cuda_capture, "CudaCapture", lambda device: Capture(gpu))
        patch.setattr(InterpretedFunction, "run", launched)
        for module, try_out in ((gpu_operators, "_try_out"), (unet_operators, "try_out")):
            patch.setattr(module, try_out, lambda *_: None)
        patch.setattr(PretendedGpu, "current", gpu)
        _forget_what_is_made_once()
        try:
            with gpu:
                yield gpu
        finally:
            _forget_what_is_made_once()


def _forget_what_is_made_once() -> None:
    for made in MADE_ONCE:
        made.cache_clear()
