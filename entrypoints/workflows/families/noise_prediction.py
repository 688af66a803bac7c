"""NoisePrediction: what a denoiser returns while a workflow is written."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import WorkflowError
from entrypoints.workflows.value import Value


@dataclass(frozen=True, slots=True, eq=False)
class NoisePrediction:
    """The engine computes a prediction and the sampler's step in one pass, so that `denoise` alone can read it."""

    latents: object  # whose noise it is
    denoised: Value  # these latents after the step


def denoise(noise_pred: NoisePrediction, latents: object) -> Value:
    """The latents after the sampler's step. latents: those that the noise was predicted for. Raises WorkflowError."""
    if not isinstance(noise_pred, NoisePrediction):
        problem = f"it is a {type(noise_pred).__name__}; give what a denoiser returns"
        raise WorkflowError(f"denoise, noise_pred: {problem}", node="denoise", input="noise_pred")
    if noise_pred.latents is not latents:
        problem = "the noise was predicted for others"
        raise WorkflowError(f"denoise, latents: {problem}", node="denoise", input="latents")
    return noise_pred.denoised
