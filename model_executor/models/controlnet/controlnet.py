"""The interface of ControlNets, and what a step shows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from core.control import MAX_CONTROLS
from core.errors import ConfigError
from model_executor.checkpoint.loader import CONTROLNET_PART, ModelCheckpoint
from model_executor.models.base import Row, SteeredModel
from model_executor.models.controlnet.residuals import Residuals
from model_executor.parallel.group import Group
from model_executor.parallel.rows import are_even, balanced, num_computed


@dataclass(frozen=True, slots=True)
class Shown:
    """One control picture of a step."""

    embedded: tuple[Tensor, ...]  # as `ControlNet.embed` returns it
    mode: int | None  # of the picture, for a ControlNet with modes
    scale: float  # factor on what is added


class ControlNet(ABC):
    """A ControlNet of one kind of models, opened without weights. It holds no state of a request.

    checkpoint: of one part. model: that it steers, of one of `families`. modes: that requests may ask for; none for one
    of a single kind of pictures.
    """

    families: ClassVar[Collection[str]]
    """Of the models that it steers, see `ModelInfo`."""

    is_joint: ClassVar[bool] = False
    """See `ControlType`."""

    def __init__(self, checkpoint: ModelCheckpoint, model: SteeredModel, modes: Collection[int] = ()) -> None:
        """Raises ConfigError, as `_check`."""
        self.checkpoint = checkpoint
        self._model = model
        self._config = checkpoint.config(CONTROLNET_PART)
        self._module: Any = None
        self._check(modes)

    @abstractmethod
    def _check(self, modes: Collection[int]) -> None:
        """Raises ConfigError if it cannot be used with its model or has no such modes."""

    def _check_modes(self, modes: Collection[int], num_modes: int | None) -> None:
        """num_modes: that it has; None: it is for a single kind of pictures."""
        if num_modes is None and modes:
            raise self._refuse("it is for a single kind of control pictures; leave its types out")
        if num_modes is not None and not modes:
            remedy = "name them: types = { canny = 0 }"
            raise self._refuse(f"it is for {num_modes} kinds of control pictures, by mode; {remedy}")
        if num_modes is not None and (unknown := [mode for mode in modes if mode >= num_modes]):
            raise self._refuse(f"it has no mode {unknown[0]}, but 0 to {num_modes - 1}")

    def _refuse(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.checkpoint.path}: {reason}")

    @property
    def recipe(self) -> str:
        """All that it computes depends on, besides its weights and configuration. Those with equal recipes, and equal
        weights, are one."""
        wish = " batch-invariant" if self.checkpoint.batch_invariant else ""
        return f"{type(self).__name__} {self._model.recipe}{wish}"

    @classmethod
    def pack(cls, checkpoint: ModelCheckpoint, module: nn.Module) -> None:
        """Bring the weights of a loaded module, in place, into the form that a CPU computes with. The keeper of weights
        does, so that all workers share that form; `put` does it to a module that comes from elsewhere.
        """

    def put(self, module: nn.Module) -> None:
        """Put the loaded module in use, which it changes."""
        self._module = module

    def drop(self) -> None:
        """Drop the weights."""
        self._module = None

    def kept_bytes(self, control: Tensor, grid: tuple[int, int], num_rows: int) -> int:
        """Most bytes that a request keeps for it between its batches: control pictures, and what a step adds. control:
        one of them, as `Family.encode_controls` returns it, of this size in tokens, (rows, columns)."""
        of_row, of_picture = self._residual_numbers(grid), self._embedded_numbers(control, grid)
        numbers = num_rows * of_row + MAX_CONTROLS * of_picture
        return MAX_CONTROLS * control.nbytes + numbers * self.checkpoint.dtype.itemsize

    @abstractmethod
    def _residual_numbers(self, grid: tuple[int, int]) -> int:
        """How many numbers a step that computes all tokens adds to a row."""

    @abstractmethod
    def _embedded_numbers(self, control: Tensor, grid: tuple[int, int]) -> int:
        """How many numbers `embed` makes of a control picture."""

    @abstractmethod
    def embed(self, control: Tensor, mode: int | None) -> tuple[Tensor, ...]:
        """What all steps of a run see of a control picture. control: as `Family.encode_control` returns it."""

    def residuals(self, rows: Sequence[Row], shown: Sequence[Shown], group: Group | None = None) -> Residuals:
        """What a step adds, for these control pictures together. rows: of one request; they have neither pages nor what
        their denoiser has made for all steps. shown: at least one, and one with another scale than 0. group: of ranks
        that compute it together, by rows where that is fair. All of them call this alike and get the same tensors.
        Raises GroupBrokenError, perhaps while tensors are taken.
        """
        if group is None or not (self._is_row_invariant and are_even(rows, group.degree)):
            return self._residuals(rows, shown, group)
        spans = balanced(list(map(num_computed, rows)), group.degree)
        own = self._residuals(rows[slice(*spans[group.me])], shown, None)
        lengths = [stop - start for start, stop in spans]
        return Residuals(own.places, ([group.gather(tensor, lengths) for tensor in some] for some in own.made))

    @property
    def _is_row_invariant(self) -> bool:
        """Whether a row's tensors are the same bit for bit whichever rows are computed with it."""
        return True

    @abstractmethod
    def _residuals(self, rows: Sequence[Row], shown: Sequence[Shown], group: Group | None) -> Residuals:
        """As `residuals`. group: of ranks that do not compute it by rows."""
