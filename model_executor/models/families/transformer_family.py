"""TransformerFamily: the code that families with a transformer as denoiser share: its calls, its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.kernels.operators import Operators
from model_executor.models.base import ModulationInputs, PrimeRow, Row
from model_executor.models.families.vae_family import VaeFamily
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.parallel.group import Group
from model_executor.parallel.rows import are_even, predict_rows
from model_executor.patches.part_patches import AnyPatches
from model_executor.samplers.sampling import Sampling
from model_executor.samplers.timestep_sampling import TimestepSampling


class TransformerFamily(VaeFamily):
    """The transformer works on patches of a VAE's latents; subclasses add text or classes, and sampling."""

    denoiser: ClassVar[type[Denoiser]]
    _sampling: Sampling | TimestepSampling

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._transformer_config = checkpoint.config("transformer")

    # ------------------------------------------------------------------------------------------------------- parts

    @property
    def _denoiser_recipe(self) -> str:
        return f"{self.denoiser.__name__} {self._sampling.num_train_timesteps}"

    def _make_denoiser(self, module: nn.Module, operators: Operators) -> Denoiser:
        return self.denoiser(module, self._sampling.num_train_timesteps, operators, owns_module=True)

    def _outline_patches_of(self, part: str) -> AnyPatches:
        return self.denoiser(self._checkpoint.outline(part), self._sampling.num_train_timesteps).patches

    @property
    def _denoiser(self) -> Denoiser:
        denoiser: Denoiser = self._part("transformer")
        return denoiser

    # ------------------------------------------------------------------------------------------------------ priming

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        return self.denoiser.layout_of(self._transformer_config, dtype)

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        return self._denoiser.prime(rows, blocks)

    # ---------------------------------------------------------------------------------------------------- denoising

    def modulation(self, inputs: ModulationInputs) -> Tensor | None:
        return self._denoiser.modulation(inputs)

    def prompt_state(self, prompt_embeds: Tensor, patches: PatchSet = ()) -> Tensor | None:
        return self._denoiser.prompt_state(prompt_embeds, patches)

    def predict(self, rows: Sequence[Row], group: Group | None = None) -> list[Tensor]:
        denoiser = self._denoiser
        if group is None or not are_even(rows, group.degree):
            return denoiser.forward(rows, group)
        return predict_rows(rows, group, denoiser.forward, denoiser.dtype)
