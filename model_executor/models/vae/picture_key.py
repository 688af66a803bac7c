"""PictureKey: what the output of a VAE's encoder is kept by. Several ops encode the same picture, and so do edits that
try the same mask again, with another seed or prompt.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from model_executor.models.last import are_equal


class PictureKey(NamedTuple):
    """Equal pixels of equal owners. Owners are kept apart because a hit would reveal to one what another one has
    edited. Tensors are in host memory if comparing is not to wait for a GPU."""

    template: Tensor  # uint8 [height, width, 3]
    cache_salt: str  # see `CacheConfig.salt`
    mask: Tensor | None = None  # uint8 [height, width], of what is left out of the template; None: nothing

    @classmethod
    def of(cls, template: Tensor, cache_salt: str | None, mask: Tensor | None = None) -> Self | None:
        """None without a salt, even an empty one: nothing is to be kept."""
        return None if cache_salt is None else cls(template, cache_salt, mask)

    def equals(self, other: Self) -> bool:
        """See `Key`."""
        is_theirs = self.cache_salt == other.cache_salt
        return is_theirs and are_equal(self.template, other.template) and are_equal(self.mask, other.mask)

    def copy(self) -> Self:
        """See `Key`."""
        return self._replace(template=self.template.clone(), mask=None if self.mask is None else self.mask.clone())
