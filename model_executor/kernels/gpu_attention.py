"""Attention on a GPU: for all requests of a batch in one call where the device supports it, else in a few."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model_executor.kernels.attention import KeysValues, KeyValueSource, Sizes, head_major
from model_executor.kernels.gpu_tables import longest, offsets
from model_executor.kernels.ragged import Span, spans

logger = logging.getLogger("stencil.worker")

FLASH_3, HOPPER = "flash_attn_interface", 9
"""flash-attn 3: its module's name, and the major compute capability that it supports."""

FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""What flash attention supports: Ampere and later, half precision, head dims up to this."""

CUDNN_MAJORS, CUDNN_VERSION = (HOPPER, 10), 91500
"""Where PyTorch prefers cuDNN's attention to its own (`sdp_utils.cpp`): these major compute capabilities, with a cuDNN
version above this."""

ROWS = 64
"""`attend_alike` pads a request's queries to a multiple of this: cuDNN builds a plan for every number of queries, and
processes this many at a time."""

Attend = Callable[[Tensor, Tensor, Tensor, Sequence[Span], Sequence[Span]], Tensor]
"""(queries [queries, heads, head dim], keys [keys, heads, head dim], values, rows of each request's queries, rows of
its keys) -> [queries, heads * head dim]."""


def take_flash_3(device: torch.device) -> None:
    """Make PyTorch use flash-attn 3 as its flash attention, where that is installed and the GPU is a Hopper."""
    if importlib.util.find_spec(FLASH_3) is None or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device)[0] == HOPPER:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError) as error:
            logger.warning("attention is PyTorch's own, since flash-attn 3 cannot be used: %s", error)


class Together:
    """Attends for all requests of a batch together: their keys and values lie in one tensor [keys, 2, heads, head dim].
    Where every request computes all tokens, this is the block's own output, and nothing is copied."""

    def __init__(self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, attend: Attend) -> None:
        self._sizes, self._attend = sizes, attend
        self._where = spans(map(sum, sizes))
        self._shape = (self._where[-1][1], 2, heads, head_dim)
        self._like = like

    @cached_property
    def _joint(self) -> Tensor:
        return self._like.new_empty(self._shape)

    @cached_property
    def _keys_values(self) -> Sequence[KeysValues]:
        requests = zip(self._where, self._sizes, strict=True)
        return [KeysValues(head_major(self._joint[start:stop]), text) for (start, stop), (text, _) in requests]

    def __call__(
        self,
        number: int,
        page: int,
        qkv: Tensor,
        where: Sequence[Span],
        sources: Sequence[KeyValueSource],
        out: Tensor | None = None,
    ) -> Tensor:
        fresh = qkv[:, 1:]
        if tuple(where) == self._where and all(source.is_in_order for source in sources):
            for (start, stop), (text, _), source in zip(where, self._sizes, sources, strict=True):
                source.store(page, head_major(fresh[start + text : stop]))
            joint = fresh
        else:
            for (start, stop), keys_values, source in zip(where, self._keys_values, sources, strict=True):
                source.load(number, page, keys_values, fresh[start:stop])
                source.store(page, keys_values.image)
            joint = self._joint
        attended = self._attend(qkv[:, 0], joint[:, 0], joint[:, 1], where, self._where)
        return attended if out is None else out.copy_(attended)


def has_flash(like: Tensor, head_dim: int) -> bool:
    """Whether flash attention supports tensors like this one."""
    if like.device.type != "cuda" or like.dtype not in FLASH_DTYPES or head_dim > MAX_HEAD_DIM or head_dim % 8:
        return False
    return _capability(like.device) >= FLASH_CAPABILITY


def best_attend(like: Tensor, head_dim: int) -> Attend:
    """The fastest attention function for tensors like this one."""
    if not has_flash(like, head_dim):
        return attend_each
    if torch.nn.attention.current_flash_attention_impl() is None and prefers_cudnn(like.device):
        return attend_alike
    return varlen_attend


def prefers_cudnn(device: torch.device) -> bool:
    """Whether PyTorch uses cuDNN's attention on this device. gpu-run measures which of the two is faster."""
    version = torch.backends.cudnn.version()
    return _capability(device)[0] in CUDNN_MAJORS and version is not None and version > CUDNN_VERSION


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability


def varlen_attend(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Attends for all requests in one call of flash attention."""
    starts = offsets(tuple(where), query.device), offsets(tuple(keys), query.device)
    attended = varlen_attn(query, key, value, *starts, longest(where), longest(keys))
    assert isinstance(attended, Tensor)  # the other return types belong to options not set here
    return attended.flatten(1)


def attend_each(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Attends request by request, where flash attention is not supported."""
    q, k, v = (x[None].transpose(1, 2) for x in (query, key, value))
    outputs = [
        F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d])
        for (a, b), (c, d) in zip(where, keys, strict=True)
    ]
    return torch.cat([output[0].transpose(0, 1).flatten(1) for output in outputs])


def attend_alike(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Attends with PyTorch's preferred kernel: one call for each run of requests with equal numbers of keys and of
    padded queries."""
    outputs: list[Tensor] = []
    for (rows, length), group in groupby(zip(where, keys, strict=True), _shape):
        queries, those_keys = zip(*group, strict=True)
        first, last = those_keys[0][0], those_keys[-1][1]
        shape = len(queries), length, *key.shape[1:]
        k, v = (x[first:last].view(shape).transpose(1, 2) for x in (key, value))
        q = _padded(query, queries, rows).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if queries[-1][1] - queries[0][0] == len(queries) * rows:
            outputs.append(attended.flatten(0, 1))
        else:
            outputs += [each[: stop - start] for each, (start, stop) in zip(attended, queries, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def rows_together(attend: Attend) -> int:
    """The number of queries that a request's are padded to a multiple of, for an attention function to copy none."""
    return ROWS if attend is attend_alike else 1


def _shape(request: tuple[Span, Span]) -> tuple[int, int]:
    """(queries rounded up to a multiple of ROWS, keys) of a request."""
    (start, stop), (first, last) = request
    return -(-(stop - start) // ROWS) * ROWS, last - first


def _padded(x: Tensor, where: Sequence[Span], rows: int) -> Tensor:
    """Each span of x padded to `rows`, [spans, rows, ...]; the padding is uninitialised."""
    first, last = where[0][0], where[-1][1]
    shape = len(where), rows, *x.shape[1:]
    if last - first == len(where) * rows:
        return x[first:last].view(shape)
    padded = x.new_empty(shape)
    for each, (start, stop) in zip(padded, where, strict=True):
        each[: stop - start].copy_(x[start:stop])
    return padded
