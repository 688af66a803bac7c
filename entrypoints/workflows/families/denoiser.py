"""Denoiser: the denoising model of the served model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.graph.workflow import Edge
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel, canvas_of, failure
from entrypoints.workflows.families.lora import LoRA
from entrypoints.workflows.families.noise_prediction import NoisePrediction
from entrypoints.workflows.families.step_edges import step_edges
from entrypoints.workflows.lowered import Lowered


class Denoiser(FamilyModel):
    """Predicts noise; with `denoise`, a step of the loop, of which a request has its `num_inference_steps`:

    for step in steps(num_denoising_steps):
        noise_pred = denoiser(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    """

    op = "denoise"
    repeats = True

    def setup_io(self) -> None:
        self.add_input("latents", OF_ENGINE)
        self.add_input("prompt_embeds", OF_ENGINE)
        self.add_input("controlnet_outputs", OF_ENGINE, required=False, deferred=True)
        self.add_output("latents", OF_ENGINE)

    def __call__(self, *values: object, **named: object) -> NoisePrediction:
        denoised = super().__call__(*values, **named)
        return NoisePrediction(named.get("latents", next(iter(values), None)), denoised)

    def lower(self, connected: Connected) -> Lowered:
        """With the adapters that are attached. Raises WorkflowError."""
        if self.role:
            if connected.patches:
                raise failure(connected, "", f"adapters are of the served model, and another plays {self.role}")
            return super().lower(connected)
        loras = {each.lora.name: each.lora.scale for each in connected.patches if isinstance(each, LoRA)}
        if len(loras) < len(connected.patches):
            raise failure(connected, "", "each of its patches is another LoRA")
        return replace(super().lower(replace(connected, patches=())), loras=loras)

    def canvas(self, connected: Connected) -> str:
        """That of the latents."""
        return canvas_of(connected, "latents")

    def edges(self, connected: Connected) -> Iterator[Edge]:
        return step_edges(connected)
