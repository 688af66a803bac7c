"""Attention on a CPU with AMX, in bfloat16: the kernel reads keys and values from where they are.

Where all tokens are computed, this is the block's own output; otherwise it dequantises those of other tokens from an
int8 page. With 166 queries over 1,088 keys, 8 heads of 64 numbers, copying them together first took 1.6 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from model_executor.kernels.attention import KeysValues, KeyValueSource, Sizes, head_major
from model_executor.kernels.cpu_kernels import Kernels, Keyframe, Others
from model_executor.kernels.ragged import Span


class PlacedKeysValues(KeysValues):
    """Keys and values of one request in the current block, which stay where they are. `joint` has them only after a
    source has filled it: from pages that are not int8, or with rows in another order."""

    def __init__(self, joint: Tensor, text_tokens: int) -> None:
        super().__init__(joint, text_tokens)
        self._computed = self._joint_rows = joint.permute(2, 0, 1, 3)
        self._others: Others | None = None

    def put(self, fresh: Tensor, rows: Tensor | None) -> None:
        """As `KeysValues.put`."""
        if rows is None:
            self._computed = fresh
        else:
            super().put(fresh, rows)
            self._computed = self._joint_rows
        self._others = None

    def place(self, near: Keyframe, far: Keyframe | None, fresh: Tensor, rows: Tensor) -> None:
        """Take the image's keys and values from a page, and these rows, text before image, from `fresh`, [rows, 2,
        heads, head dim]. All must stay as they are until `attend`."""
        self._computed, self._others = fresh, Others(near, far, rows, self.text_tokens)

    @property
    def computed_image(self) -> Tensor | None:
        """Of all image tokens, in order, [2, heads, image tokens, head dim]; None if some are on a page."""
        return None if self._others is not None else head_major(self._computed[self.text_tokens :])

    def attend(self, query: Tensor, kernels: Kernels, room: Tensor, out: Tensor) -> None:
        """query: [queries, heads, head dim]; room: see `Kernels.attend_to_parts`. Writes to out, [queries, heads * head
        dim]."""
        kernels.attend_to_parts(query, self._computed, self._others, room, out)


class TileAttention:
    """Attends request by request. A query's bits depend on that query and its keys and values in their order."""

    def __init__(self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, kernels: Kernels) -> None:
        """like: has the dtype to compute in. kernels: with tiles."""
        most = max(map(sum, sizes))
        room = like.new_empty(2 * heads * most * head_dim)
        self._keys_values = [
            PlacedKeysValues(room[: 2 * heads * sum(size) * head_dim].view(2, heads, sum(size), head_dim), size[0])
            for size in sizes
        ]
        self._kernels, self._room = kernels, kernels.attention_room(head_dim, most)

    def __call__(
        self,
        number: int,
        page: int,
        qkv: Tensor,
        where: Sequence[Span],
        sources: Sequence[KeyValueSource],
        out: Tensor | None = None,
    ) -> Tensor:
        """As `Attention.__call__`."""
        if out is None:
            out = qkv.new_empty(len(qkv), qkv.shape[2] * qkv.shape[3])
        for (start, stop), source, keys_values in zip(where, sources, self._keys_values, strict=True):
            source.load(number, page, keys_values, qkv[start:stop, 1:])
            if (image := keys_values.computed_image) is not None:
                source.store(page, image)
            keys_values.attend(qkv[start:stop, 0], self._kernels, self._room, out[start:stop])
        return out
