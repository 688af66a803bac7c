"""Makes a workflow of a composition, as the file that `program_of` writes would, but without running its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.graph.workflow import Workflow as Graph
from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.comfy.composition import Composition, Pass
from entrypoints.workflows.comfy.program import Name, beginning
from entrypoints.workflows.compiler import compile_workflow
from entrypoints.workflows.families import (
    VAE,
    ControlNet,
    Denoiser,
    LatentsGenerator,
    TextEncoder,
    Upscaler,
    denoise,
)

NAME = "graph"


def composed_workflow(composition: Composition) -> Graph:
    """The engine's graph, without the composition's adapters and defaults, which requests give. It depends on
    nothing that requests say, such as prompt and seed, but on the seeds of further samplers. Raises WorkflowError.
    """
    with Workflow(name=NAME) as workflow:
        _Composer(composition, workflow).compose()
    (graph,) = compile_workflow(workflow).workflows
    return graph


class _Composer:
    def __init__(self, composition: Composition, workflow: Workflow) -> None:
        self._c, self._workflow = composition, workflow
        self._denoisers = {False: Denoiser(), True: Denoiser(role="refiner") if composition.refiner else None}
        self._embeds: dict[bool, Any] = {}
        self._controls: dict[bool, Any] = {}  # whether the pass is the smaller one -> encoded control pictures

    def compose(self) -> None:
        c, workflow = self._c, self._workflow
        values: dict[str, Any] = {
            name: workflow.add_input(name, kind) for name, kind in (("prompt", str), ("seed", int), ("number", int))
        }
        if c.picture is not None:
            values["image"] = workflow.add_input("image", Image)
        if c.mask is not None:
            values["mask"] = workflow.add_input("mask", Image, required=False)
        control_image = workflow.add_input("control_image", Image) if c.controls else None
        self._embeds[False] = TextEncoder()(values["prompt"])
        if control_image is not None:
            self._controls[False] = VAE()(image=control_image, mode="encode")
            if c.is_enlarged:
                self._controls[True] = VAE()(image=control_image, mode="encode", scale=c.scale)
        if c.refiner is not None:
            self._embeds[True] = TextEncoder(role="refiner")(values["prompt"])
        for place in range(len(c.passes)):
            values["latents"] = self._pass(place, values)
        vae = VAE(role="refiner") if c.decodes_with_refiner else VAE()
        workflow.add_output(vae(values["latents"]), name="picture")

    def _pass(self, place: int, values: Mapping[str, Any]) -> Any:
        """The latents after one sampler's steps."""
        each, values = self._c.passes[place], dict(values)
        is_small = self._c.is_enlarged and place == 0
        if self._c.is_enlarged and place == 1:
            method = {} if self._c.method == "bilinear" else {"method": self._c.method}
            values["latents"] = Upscaler(**method)(values["latents"])
        given = {
            name: values[value] if isinstance(value, Name) else value
            for name, value in beginning(self._c, place).items()
        }
        generator = LatentsGenerator(role="refiner") if each.is_refiner else LatentsGenerator()
        latents = generator(**given)
        for _ in steps(values["number"] if each.total == self._c.passes[0].total else each.total):
            latents = self._step(each, latents, is_small=is_small)
        return latents

    def _step(self, each: Pass, latents: Any, *, is_small: bool) -> Any:
        embeds, denoiser = self._embeds[each.is_refiner], self._denoisers[each.is_refiner]
        assert denoiser is not None, "a refiner's pass has a refiner"
        residuals = [ControlNet()(latents, embeds, self._controls[is_small])] if self._controls else []
        return denoise(denoiser(latents, embeds, *residuals), latents)
