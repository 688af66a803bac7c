"""TimestepFamily: the code that families share whose schedulers count in training timesteps: UNets and DiTs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import SamplingState
from model_executor.models.families.vae_family import VaeFamily, refuse
from model_executor.models.latents import unpack
from model_executor.samplers.sampling import State
from model_executor.samplers.timestep_sampling import TimestepSampling


class TimestepFamily(VaeFamily):
    """Samples with the checkpoint's scheduler, over latents as pictures."""

    _sampling: TimestepSampling

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        try:
            self._sampling = TimestepSampling(self._load_scheduler())
        except ValueError as error:
            raise refuse(checkpoint, str(error)) from error

    def _load_scheduler(self) -> Any:
        return self._checkpoint.load("scheduler")

    def denoiser_input(self, sample: SamplingState) -> Tensor:
        return self._sampling.scaled(sample.latents, sample.state[0], sample.step)

    def predict_clean(self, sample: SamplingState, prediction: Tensor) -> Tensor:
        return self._sampling.clean(sample.latents, prediction, sample.state[0], sample.step)

    def _moved(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        """Latents after a step as a picture, [1, channels, height / 8, width / 8], and the sampler's state."""
        latents, output = (unpack(x, sample.grid, self.patch) for x in (sample.latents, prediction))
        return self._sampling.step(latents, output, sample.state, sample.step)
