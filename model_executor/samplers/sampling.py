"""Flow-matching samplers: run a checkpoint's own diffusers scheduler on named tensors instead of a stateful object.

A request's sampler state is its `latents`, `sigmas` and step number, and a `State` for what else its scheduler keeps
between steps. As tensors the state can move between processes, a failed step leaves it unchanged, and requests with
different step counts share a batch. A scheduler object is made from them for each step, so the arithmetic, casts
included, is diffusers' own. A step is one call of the model: a second-order solver takes two for each noise level.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""What a scheduler keeps between steps besides its position: its tensors, an empty one for each that it does not have
yet; then, if it draws noise, the generator's state, uint8."""


WHOLE = (0.0, 1.0)
"""All of a run, as a part of it; see `ImageInputs`."""

Scale = Literal["sum", "variance", "signal"]
"""What noised latents, signal * clean + noise * random, have in common at all noise levels: the sum of the two factors
is 1 (flow matching), the sum of their squares is 1 (DDIM, DPM-Solver++), or the signal is 1 (Euler)."""


class Sampling:
    """Runs the scheduler of a checkpoint. scheduler: a flow-matching scheduler of diffusers, as loaded, which it then
    owns. Raises ValueError if noise levels do not fall to 0, as with `invert_sigmas`."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.order = int(scheduler.order)
        self.num_train_timesteps = int(scheduler.config.num_train_timesteps)
        self._names, self._is_stochastic = self._explore()
        levels = self._scheduler.sigmas
        if levels[-1] != 0 or (levels.diff() > 0).any():
            option = "invert_sigmas" if self.config.get("invert_sigmas") else "noise levels that do not fall to 0"
            raise ValueError(f"{self.name} with {option} is not supported")

    @property
    def config(self) -> Any:
        """The scheduler's configuration: scheduler_config.json, with diffusers' defaults."""
        return self._scheduler.config

    @property
    def takes_sigmas(self) -> bool:
        """Whether a pipeline may choose the noise levels itself, as FLUX's do."""
        return "sigmas" in inspect.signature(self._scheduler.set_timesteps).parameters

    has_shift = True  # as all schedulers of flow matching

    @property
    def draws_noise(self) -> bool:
        """Whether steps draw noise, from the generator that the initial latents were drawn from."""
        return self._is_stochastic

    @property
    def remembers_steps(self) -> bool:
        """Whether a step depends on those before it by more than its latents, or draws noise."""
        return bool(self._names) or self._is_stochastic

    @property
    def can_skip_steps(self) -> bool:
        """Whether a step may go to any later noise level: if it is one call of the model, and depends on no earlier
        one and on no noise.
        """
        return self.order == 1 and not self.remembers_steps

    @property
    def min_steps(self) -> int:
        """Fewest steps of a run. With `shift_terminal` the noise levels after the first are stretched to end at a given
        one; a single level would become NaN.
        """
        return 2 if self.config.get("shift_terminal") else 1

    @property
    def name(self) -> str:
        return type(self._scheduler).__name__

    def schedule(
        self,
        num_inference_steps: int,
        num_denoising_steps: int,
        timesteps: Mapping[str, Any],
        part: tuple[float, float] = WHOLE,
        shift: float | None = None,
    ) -> Tensor:
        """Noise levels of a run, or of a part of it: one for each step, and the one after the last, which is 0 at the
        end of a run. float32 [steps + 1].

        timesteps: the pipeline's arguments for `set_timesteps`. num_denoising_steps: with strength < 1, fewer than
        num_inference_steps; the first ones are skipped, as in diffusers' `get_timesteps`. part, shift: as in
        `ImageInputs`.
        """
        scheduler = self._scheduler if shift is None else self._shifted(shift)
        scheduler.set_timesteps(**timesteps)
        first = (num_inference_steps - num_denoising_steps) * self.order
        sigmas: Tensor = scheduler.sigmas[first:]
        start, stop = span_of(part, sigmas[:-1] * self.num_train_timesteps, self.num_train_timesteps, self.order)
        return sigmas[start : stop + 1].clone()

    def _shifted(self, shift: float) -> Any:
        """A scheduler with this shift instead of all that the checkpoint's does to noise levels: as it is made for
        few-step adapters, `from_config(config, shift=shift, use_dynamic_shifting=False, shift_terminal=None)`."""
        static = {"shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}
        wanted = {name: value for name, value in static.items() if name in self.config}
        return type(self._scheduler).from_config(self.config, **wanted)

    @property
    def scale(self) -> Scale:
        """How large latents are at a noise level."""
        sigmas, one, none = torch.tensor([1.0, 0.5, 0.0]), torch.ones(1), torch.zeros(1)
        return scale_of(self.noised(one, none, sigmas, 1).item(), self.noised(none, one, sigmas, 1).item())

    def begin(self, generator: torch.Generator) -> State:
        """The state before the first step. generator: the request's, after its initial latents were drawn."""
        return self._state(dict.fromkeys(self._names), generator)

    def noised(self, clean: Tensor, noise: Tensor, sigmas: Tensor, step: int) -> Tensor:
        """Clean latents at the noise level before `step`; `len(sigmas) - 1` is the level after the last step."""
        scheduler = self._at(sigmas, step)
        scheduler.sigmas = _Levels(sigmas)
        noised: Tensor = scheduler.scale_noise(clean, sigmas[step : step + 1], noise)
        return noised

    def step(self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int, state: State) -> tuple[Tensor, State]:
        """Latents and state after `step`, 0..len(sigmas) - 2. Arguments are not modified.

        latents, velocity: of the same shape, any; noise is drawn in it too.
        """
        scheduler = self._at(sigmas, step)
        held: Sequence[Tensor] = state
        generator = None
        if self._is_stochastic:
            *held, drawn = state
            generator = torch.Generator("cpu")
            generator.set_state(drawn)
        for name, tensor in zip(self._names, held, strict=True):
            setattr(scheduler, name, tensor if tensor.numel() else None)
        moved: Tensor = scheduler.step(
            velocity, scheduler.timesteps[step], latents, generator=generator, return_dict=False
        )[0]
        return moved, self._state(vars(scheduler), generator)

    def _at(self, sigmas: Tensor, step: int) -> Any:
        """A copy of the scheduler, positioned before `step`."""
        scheduler = copy.copy(self._scheduler)
        scheduler.sigmas, scheduler.timesteps = sigmas, sigmas[:-1] * self.num_train_timesteps
        scheduler._begin_index, scheduler._step_index = 0, step
        return scheduler

    def _state(self, values: Mapping[str, Any], generator: torch.Generator | None) -> State:
        held = (torch.empty(0) if values[name] is None else values[name] for name in self._names)
        return (*held, generator.get_state()) if self._is_stochastic and generator is not None else tuple(held)

    def _explore(self) -> tuple[tuple[str, ...], bool]:
        """(names of the scheduler's tensors that a step changes, whether it draws noise), found by doing a step."""
        accepted = inspect.signature(self._scheduler.set_timesteps).parameters
        self._scheduler.set_timesteps(3, **({"mu": 1.0} if "mu" in accepted else {}))
        trial, generator = copy.copy(self._scheduler), torch.Generator("cpu").manual_seed(0)
        before, drawn = dict(vars(trial)), generator.get_state()
        trial.step(torch.ones(1, 4), trial.timesteps[0], torch.ones(1, 4), generator=generator)
        changed = (name for name, value in vars(trial).items() if value is not before.get(name))
        names = tuple(sorted(name for name in changed if isinstance(vars(trial)[name], Tensor)))
        return names, not torch.equal(generator.get_state(), drawn)


class _Levels:
    """Noise levels as `scale_noise` reads them, by a number or a list of one: PyTorch would upload the list, for which
    the host waits until a GPU has done all that is queued."""

    def __init__(self, levels: Tensor) -> None:
        self._levels = levels

    def to(self, *args: Any, **options: Any) -> _Levels:
        return _Levels(self._levels.to(*args, **options))

    def __getitem__(self, index: int | Sequence[int]) -> Tensor:
        if isinstance(index, int):
            return self._levels[index]
        (number,) = index
        return self._levels[number : number + 1]


def span_of(part: tuple[float, float], timesteps: Tensor, num_train_timesteps: int, order: int) -> tuple[int, int]:
    """[start, stop) of the steps of a part among those of a run. part: as in `ImageInputs`. timesteps: of each step,
    falling.
    """
    begin, end = part
    start = num_before(begin, timesteps, num_train_timesteps, order) if begin > 0.0 else 0
    return start, num_before(end, timesteps, num_train_timesteps, order) if end < 1.0 else len(timesteps)


def num_before(share: float, timesteps: Tensor, num_train_timesteps: int, order: int) -> int:
    """Steps before this share of the noise levels, as the SDXL pipelines cut them for `denoising_start`; at least one
    step is on either side, if there are two. A solver of second order is not cut between the two calls of a step: all
    but the last step have two, so an odd number of calls must be left."""
    left = int((timesteps < round(num_train_timesteps - share * num_train_timesteps)).sum())
    if order == 2 and left % 2 == 0:
        left += 1
    return min(max(len(timesteps) - left, order), len(timesteps) - 1)


def scale_of(signal: float, noise: float) -> Scale:
    """The kind of scale that these factors are of, at a noise level amid a run."""
    ratio = noise / signal
    signals: dict[Scale, float] = {"sum": 1 / (1 + ratio), "variance": (1 + ratio**2) ** -0.5, "signal": 1.0}
    return min(signals, key=lambda scale: abs(signals[scale] - signal))


def dynamic_shift(config: Any, image_tokens: int, max_shift: float = 1.15) -> float:
    """`mu` of dynamic shifting, linear in the number of image tokens, as diffusers' calculate_shift. max_shift: used
    where the configuration has none."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (top - base) / (high - low)
    return float(image_tokens * slope + (base - slope * low))


def predict_clean(latents: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """The clean latents that `velocity` points at from noise level `sigma`."""
    return (latents.float() - sigma * velocity).to(velocity.dtype)
