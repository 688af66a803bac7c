"""Attention on a CPU with AMX, in bfloat16: the kernel reads keys and values from where they are.

Where all tokens are computed, this is the block's own output; otherwise it dequantises those of other tokens from an
int8 page. With 166 queries over 1,088 keys, 8 heads of 64 numbers, copying them together first took 1.6 times as long.
"""

from __future__ import annotations

from torch import Tensor

from model_executor.kernels.attention import KeysValues, head_major
from model_executor.kernels.cpu_kernels import Kernels, Keyframe, Others


class PlacedKeysValues(KeysValues):
    """Keys and values of one request in the current block, which stay where they are. `joint` has them only after a
    source has filled it: from pages that are not int8, or with rows in another order."""

    def __init__(self, joint: Tensor, text_tokens: int) -> None:
        super().__init__(joint, text_tokens)
        self.computed = self._joint_rows = joint.permute(2, 0, 1, 3)
        self.others: Others | None = None

    def put(self, fresh: Tensor, rows: Tensor | None) -> None:
        """As `KeysValues.put`."""
        if rows is None:
            self.computed = fresh
        else:
            super().put(fresh, rows)
            self.computed = self._joint_rows
        self.others = None

    def place(self, near: Keyframe, far: Keyframe | None, fresh: Tensor, rows: Tensor) -> None:
        """Take the image's keys and values from a page, and these rows, text before image, from `fresh`, [rows, 2,
        heads, head dim]. All must stay as they are until `attend`."""
        assert near.values.shape[2] == self.num_tokens - self.text_tokens, "C would read or write beyond them"
        self.computed, self.others = fresh, Others(near, far, rows, self.text_tokens)

    @property
    def whole_image(self) -> Tensor | None:
        """What `KeysValues.whole_image` gives; None if some of it is on a page."""
        return None if self.others is not None else head_major(self.computed[self.text_tokens :])


def attend_in_place(query: Tensor, keys_values: PlacedKeysValues, out: Tensor, kernels: Kernels, room: Tensor) -> None:
    """Attention of one request, see `attention.attend`. kernels: with tiles. room: see `Kernels.attention_room`. A
    query's bits depend on that query, and on its keys and values in their order."""
    kernels.attend_to_parts(query, keys_values.computed, keys_values.others, room, out)
