"""Program: a composition as the text of a file of the language."""

from __future__ import annotations

from collections.abc import Iterator

from core.graph.workflow import Literal
from entrypoints.workflows.comfy.composition import Composition, Pass
from entrypoints.workflows.comfy.strength import exact_strength

WIDTH = 120
"""Most characters of a line, if Python lets it be broken."""


def program_of(composition: Composition, name: str) -> str:
    """name: of the workflow. Its file's text, which says the graph's values as defaults of requests."""
    return "\n".join(_Writer(composition, name).lines()) + "\n"


class _Writer:
    def __init__(self, composition: Composition, name: str) -> None:
        self._c, self._name = composition, name

    def lines(self) -> Iterator[str]:
        yield from self._header()
        yield from self._imports()
        yield ""
        yield f"with Workflow(name={_quoted(self._name)}) as workflow:"
        for line in (*self._inputs(), *self._defaults(), *self._models(), *self._passes()):
            yield f"    {line}" if line else ""

    def _header(self) -> Iterator[str]:
        """What the graph names is quoted in comments of a line each, which no text can end."""
        composition = self._c
        yield f'"""{self._name}: made of a ComfyUI graph."""'
        yield ""
        yield f"# A model is served with this workflow: that of {_quoted(composition.model.name)}."
        for name in composition.loras:
            yield f"# It has an adapter {_quoted(name)}."
        for name in dict.fromkeys(each.net.name for each in composition.controls):
            yield f"# It has a ControlNet {_quoted(name)}."
        if composition.refiner:
            yield f"# Its refiner is {_quoted(composition.refiner.name)}."
        for fields, node in (("image", composition.picture), ("mask or mask_image", composition.mask)):
            if node is not None:
                yield f"# Requests give what node {_quoted(node.id)} loads, as {fields}."
        for each in composition.controls:
            yield f"# Requests give what node {_quoted(each.picture.id)} loads, as the next control_image."
        for node in composition.left_out:
            yield f"# What node {_quoted(node.id)} shows is no result."
        yield ""
        yield "from __future__ import annotations"
        yield ""

    def _imports(self) -> Iterator[str]:
        names = ["VAE", "Denoiser", "LatentsGenerator", "TextEncoder", "denoise"]
        names += ["LoRA"] * bool(self._c.loras) + ["Upscaler"] * self._c.is_enlarged
        names += ["ControlNet"] * bool(self._c.controls)
        language = ["Workflow", "steps"] + ["Image"] * bool(self._c.picture or self._c.controls)
        yield f"from entrypoints.workflows import {', '.join(_sorted(language))}"
        yield f"from entrypoints.workflows.families import {', '.join(_sorted(names))}"

    def _inputs(self) -> Iterator[str]:
        yield 'prompt = workflow.add_input("prompt", str)'
        yield 'seed = workflow.add_input("seed", int)'
        yield 'number = workflow.add_input("number", int)'
        if self._c.picture is not None:
            yield 'image = workflow.add_input("image", Image)'
        if self._c.mask is not None:
            yield 'mask = workflow.add_input("mask", Image, required=False)'
        if self._c.controls:
            yield 'control_image = workflow.add_input("control_image", Image)'

    def _defaults(self) -> Iterator[str]:
        yield "workflow.set_defaults("
        for name, value in self._c.defaults.items():
            yield f"    {name}={_literal(value)},"
        yield ")"

    def _models(self) -> Iterator[str]:
        yield "denoiser = Denoiser()"
        for name, scale in self._c.loras.items():
            yield f"denoiser.add_patch(LoRA({_quoted(name)}, {scale!r}))"
        yield "prompt_embeds = TextEncoder()(prompt)"
        if self._c.controls:
            yield 'controls = VAE()(image=control_image, mode="encode")'
        if self._c.controls and self._c.is_enlarged:
            yield f'small_controls = VAE()(image=control_image, mode="encode", scale={self._c.scale!r})'
        if self._c.refiner is not None:
            yield 'refiner = Denoiser(role="refiner")'
            yield 'refined_embeds = TextEncoder(role="refiner")(prompt)'

    def _passes(self) -> Iterator[str]:
        for place, each in enumerate(self._c.passes):
            is_small = self._c.is_enlarged and place == 0
            if self._c.is_enlarged and place == 1:
                method = "" if self._c.method == "bilinear" else f"method={_quoted(self._c.method)}"
                yield f"latents = Upscaler({method})(latents)"
            role = 'role="refiner"' if each.is_refiner else ""
            given = (_given(name, value) for name, value in beginning(self._c, place).items())
            yield f"latents = LatentsGenerator({role})({', '.join(given)})"
            yield f"for _ in steps({each.total if each.total != self._c.passes[0].total else 'number'}):"
            for line in self._step(each, is_small):
                yield f"    {line}"
        role = 'role="refiner"' if self._c.decodes_with_refiner else ""
        yield f'workflow.add_output(VAE({role})(latents), name="picture")'

    def _step(self, each: Pass, is_small: bool) -> Iterator[str]:
        denoiser, embeds = ("refiner", "refined_embeds") if each.is_refiner else ("denoiser", "prompt_embeds")
        residuals = ""
        if self._c.controls:
            controls = "small_controls" if is_small else "controls"
            yield f"residuals = ControlNet()(latents, {embeds}, {controls})"
            residuals = ", residuals"
        yield f"noise_pred = {denoiser}(latents, {embeds}{residuals})"
        yield "latents = denoise(noise_pred, latents)"


class Name(str):
    """A variable of the program, for one of its arguments."""


def beginning(composition: Composition, place: int) -> dict[str, Literal | Name]:
    """What the LatentsGenerator of a pass is given. place: of the pass."""
    first, each = composition.passes[0], composition.passes[place]
    has_own_seed = place > 0 and not each.goes_on and each.seed != first.seed
    given: dict[str, Literal | Name] = {"seed": each.seed if has_own_seed else Name("seed")}
    for name, is_given in (("image", composition.picture), ("mask", composition.mask)):
        if is_given is not None:
            given[name] = Name(name)
    if place == 0 and composition.is_enlarged:
        given["scale"] = composition.scale
    if place > 0:
        given["latents"] = Name("latents")
    if each.goes_on:
        given["denoising_start"] = each.begin
    elif place > 0:
        given["strength"] = exact_strength(each.steps, each.total)
    if each.end < 1:
        given["denoising_end"] = each.end
    if each.starts_over and each.is_whole:
        given["starts_over"] = True
    if composition.picture is None:
        given["noise_first"] = True
    return given


def _given(name: str, value: Literal | Name) -> str:
    if isinstance(value, Name):
        return name if name == value == "seed" else f"{name}={value}"
    return f"{name}={_literal(value)}"


def _literal(value: Literal) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """As Python and ruff write it, in one line of ASCII."""
    written = ascii(text)
    return written if '"' in written else f'"{written[1:-1]}"'


def _sorted(names: list[str]) -> list[str]:
    """As ruff sorts imports: constants, classes, functions."""
    return sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
