"""TransformerControlNet: what ControlNets of transformers share: some of the transformer's blocks, each with a layer
behind it, over tokens of latents and control picture added up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import ClassVar

from torch import Tensor, nn

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.kernels.linear_groups import AnyGroup
from model_executor.kernels.operators import chosen_operators
from model_executor.kernels.ragged import gather
from model_executor.models.base import Row
from model_executor.models.controlnet.control_row import ControlRow
from model_executor.models.controlnet.controlnet import ControlNet, Shown
from model_executor.models.controlnet.residuals import Residuals
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.sequence import Shard, Team
from model_executor.models.transformer.stream import Stream
from model_executor.parallel.group import Group


class ControlTransformer(Denoiser):
    """The blocks of a ControlNet's module; other classes say how tokens are embedded."""

    def _make_output(self) -> tuple[Modulation, AnyGroup]:
        """A layer behind each block, of which the last one's is returned; there is no last norm."""
        self._outs = [self._group(layer) for layer in self._layers_behind()]
        return self._blocks[-1].modulation, self._outs[-1]

    @abstractmethod
    def _layers_behind(self) -> Sequence[nn.Module]:
        """The layer behind each block."""

    def samples(self, rows: Sequence[ControlRow], group: Group | None) -> Iterator[Tensor]:
        """What each block gives, [rows, tokens, hidden], as soon as it has run. rows: of one request. group: of ranks
        that compute the tokens together."""
        sources = [self._edit_source(row) for row in rows]
        if group is None:
            yield from self._samples(self._start(rows, sources), len(rows))
            return
        shards = [Shard(source, group, self._device) for source in sources]
        parts = [replace(row, text=shard.text) for row, shard in zip(rows, shards, strict=True)]
        stream = self._start(parts, shards, Team(group, self._shares(group)))
        for sample in self._samples(stream, len(rows)):
            yield group.gather(sample.transpose(0, 1), shards[0].final_lengths()).transpose(0, 1)

    def _samples(self, stream: Stream, num_rows: int) -> Iterator[Tensor]:
        """As `samples`, of the tokens of a stream."""
        for number, block in enumerate(self._blocks):
            block.run(stream, number)
            image = gather(stream.hidden, stream.packing.joint_image)
            yield self._outs[number](image, ()).view(num_rows, -1, image.shape[1])


class TransformerControlNet(ControlNet):
    """A mask-aware step has it compute the active tokens alone, which attend to one another and to the text."""

    alike: ClassVar[Collection[str]]
    """Entries of the configuration that are those of the transformer."""

    transformer: ClassVar[type[ControlTransformer]]

    def _check(self, modes: Collection[int]) -> None:
        config, model = self._config, self._model
        for name in self.alike:
            if name in config and config[name] != model.config.get(name):
                raise self._refuse(f"{name} is {config[name]}, and {model.config.get(name)} in the transformer")
        self._check_modes(modes, config.get("num_mode"))

    @property
    def recipe(self) -> str:
        """With the kernels, and the blocks that add something: equal ones may steer transformers of other depths."""
        return f"{super().recipe} {self.checkpoint.kernels} {self._places}"

    @classmethod
    def pack(cls, checkpoint: ModelCheckpoint, module: nn.Module) -> None:
        cls._over(checkpoint, module, num_train_timesteps=1)  # on which weights do not depend

    def put(self, module: nn.Module) -> None:
        self._module = self._over(self.checkpoint, module, self._model.num_train_timesteps)

    @classmethod
    def _over(cls, checkpoint: ModelCheckpoint, module: nn.Module, num_train_timesteps: int) -> ControlTransformer:
        """The transformer over a module, whose weights are packed unless they are."""
        batch_invariant = checkpoint.batch_invariant
        operators = chosen_operators(checkpoint.kernels, checkpoint.device, batch_invariant=batch_invariant)
        return cls.transformer(module, num_train_timesteps, operators, owns_module=True)

    def _residual_numbers(self, grid: tuple[int, int]) -> int:
        rows, columns = grid
        width = int(self._config["num_attention_heads"]) * int(self._config["attention_head_dim"])
        return (1 + max(self._places)) * rows * columns * width

    def _embedded_numbers(self, control: Tensor, grid: tuple[int, int]) -> int:
        return 0  # it is the same tensor

    def embed(self, control: Tensor, mode: int | None) -> tuple[Tensor, ...]:
        """control: [image tokens, latent width], which steps see as it is."""
        return (control,)

    def _residuals(self, rows: Sequence[Row], shown: Sequence[Shown], group: Group | None) -> Residuals:
        return reduce(add, (self._of_one(rows, each, group) for each in shown if each.scale))

    def _of_one(self, rows: Sequence[Row], shown: Shown, group: Group | None) -> Residuals:
        transformer: ControlTransformer = self._module
        samples = transformer.samples([self._row(row, shown) for row in rows], group)
        return Residuals(self._places, ((sample * shown.scale,) for sample in samples))

    def _row(self, row: Row, shown: Shown) -> ControlRow:
        return ControlRow.of(row, shown)

    @property
    @abstractmethod
    def _places(self) -> tuple[int, ...]:
        """See `Residuals`. Blocks of the transformer share what is added."""
