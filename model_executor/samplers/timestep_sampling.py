"""Samplers of UNets, whose schedulers count in training timesteps: DDIM, PNDM, Euler, Euler ancestral, DPM-Solver++.
They run diffusers' schedulers on named tensors, as in `sampling.py`.

A request's *run* is three integers, from which diffusers computes the timesteps. They come first in its `State`; the
rest is what the scheduler keeps between steps, each attribute as one tensor. A scheduler object is made from them for
each step, so the arithmetic is diffusers' own.

The noise level of a timestep is its share of all training timesteps. It falls from 1 to 0 as in flow matching, and is
converted back to the timestep for the model.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache, lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_executor.samplers.sampling import WHOLE, Scale, State, scale_of, span_of

CACHED_RUNS = 64
"""Schedulers cached, one for each number of steps; each is a few arrays of as many numbers."""

TRIAL_STEPS = 4
"""Steps of the trial run that finds what a scheduler keeps. None keeps the predictions of more than three steps."""

PREDICTIONS = ("epsilon", "v_prediction")


class TimestepSampling:
    """Runs the scheduler of a checkpoint. scheduler: a timestep scheduler of diffusers, as loaded, which it then owns.
    Raises ValueError for models that predict neither noise nor velocity, and for PNDM's Runge-Kutta steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.name = type(scheduler).__name__
        self.order = int(scheduler.order)
        self.num_train_timesteps = int(scheduler.config.num_train_timesteps)
        self._prediction = scheduler.config.get("prediction_type")
        if self._prediction not in PREDICTIONS:
            raise ValueError(f"{self.name} with prediction_type {self._prediction} is not supported")
        if scheduler.config.get("skip_prk_steps") is False:
            raise ValueError(f"{self.name} with skip_prk_steps off is not supported")
        self._of_steps = lru_cache(maxsize=CACHED_RUNS)(self._make)
        self._alphas = cache(scheduler.alphas_cumprod.to)  # on a device
        self._takes_generator = "generator" in inspect.signature(scheduler.step).parameters
        self._names, self._is_stochastic = self._explore()

    # -------------------------------------------------------------------------------------------------------- runs

    has_shift = takes_sigmas = False  # a run is three integers

    @property
    def extra_steps(self) -> int:
        """Calls of the model in a run beyond the usual: `order` per step, and one for the last. PNDM takes the second
        step twice."""
        return len(self._of_steps(TRIAL_STEPS).timesteps) - self.order * (TRIAL_STEPS - 1) - 1

    @property
    def remembers_steps(self) -> bool:
        """Whether a step depends on those before it by more than its latents, or draws noise."""
        return bool(self._names) or self._is_stochastic

    @property
    def min_steps(self) -> int:
        """Fewest steps for which `extra_steps` holds: a run of one step has no second to take twice."""
        return next(n for n in count(1) if len(self._of_steps(n).timesteps) == self._num_calls(n))

    def _num_calls(self, num_steps: int) -> int:
        return self.order * (num_steps - 1) + 1 + self.extra_steps

    def run(self, num_inference_steps: int, num_denoising_steps: int, part: tuple[float, float] = WHOLE) -> Tensor:
        """The run, int64 [3]: its steps at full strength, and of their timesteps the numbers [start, stop) of those
        that it takes. With strength < 1 it skips the first ones, as in diffusers' `get_timesteps`. part: as in
        `ImageInputs`."""
        first = (num_inference_steps - num_denoising_steps) * self.order
        timesteps = self._of_steps(num_inference_steps).timesteps[first:]
        start, stop = span_of(part, timesteps, self.num_train_timesteps, self.order)
        return torch.tensor([num_inference_steps, first + start, first + stop])

    def noise_levels(self, run: Tensor) -> Tensor:
        """Noise levels, one for each step and the one after the last, which is 0 at the end: float32 [steps + 1]. Times
        `num_train_timesteps` they are the timesteps."""
        scheduler, begin, stop = self._of_run(run)
        levels = scheduler.timesteps.double() / self.num_train_timesteps
        return torch.cat([levels, levels.new_zeros(1)])[begin : stop + 1].float()

    @property
    def scale(self) -> Scale:
        """How large latents are at a noise level."""
        run, one, none = self.run(TRIAL_STEPS, TRIAL_STEPS), torch.ones(1), torch.zeros(1)
        middle = TRIAL_STEPS // 2
        return scale_of(self.noised(one, none, run, middle).item(), self.noised(none, one, run, middle).item())

    def begin(self, run: Tensor, generator: torch.Generator) -> State:
        """The state before the first step. generator: the request's, after its initial latents were drawn."""
        return self._state(run, self._of_run(run)[0], generator)

    # ------------------------------------------------------------------------------------------------------- steps

    def pure_noise(self, noise: Tensor, run: Tensor) -> Tensor:
        """Standard normal noise, scaled to the initial latents of a run at full strength."""
        started: Tensor = noise * self._of_run(run)[0].init_noise_sigma
        return started

    def noised(self, clean: Tensor, noise: Tensor, run: Tensor, step: int) -> Tensor:
        """Clean latents at the noise level before `step`; unchanged after the last step, also where another model goes
        on, as the pipelines do.

        The factors of both are read off the scheduler's result for ones, on the host: it would upload its tables and
        the timestep at every step, and each upload waits for a GPU.
        """
        scheduler, begin, stop = self._of_run(run)
        timestep = scheduler.timesteps[begin + step : min(begin + step + 1, stop)]
        if not len(timestep):
            return clean
        one, none = torch.eye(2, dtype=clean.dtype)
        of_clean, of_noise = self._at(run, step).add_noise(one, none, timestep).tolist()
        noised: Tensor = of_clean * clean + of_noise * noise
        return noised

    def shares(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """(factor of clean latents, factor of noise) in latents of unit variance at a noise level, interpolated between
        timesteps; each has the shape of `level`."""
        timestep = (level.float() * self.num_train_timesteps).clamp(max=self.num_train_timesteps - 1)
        alphas = self._alphas(level.device)
        below = timestep.long().clamp(max=len(alphas) - 2)
        # An index of no dimensions would be read on the host, which would wait for a GPU at every step.
        alpha = torch.lerp(alphas.take(below), alphas.take(below + 1), timestep - below)
        return alpha.sqrt(), (1 - alpha).sqrt()

    def scaled(self, latents: Tensor, run: Tensor, step: int) -> Tensor:
        """Latents before `step`, scaled from the scheduler's range to the model's input, of unit variance."""
        scheduler = self._at(run, step)
        scaled: Tensor = scheduler.scale_model_input(latents, self._timestep(scheduler))
        return scaled

    def step(self, latents: Tensor, prediction: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        """Latents and state after `step`, counted from the run's first. Arguments are not modified. latents,
        prediction: of the same shape, any; noise is drawn in it too."""
        scheduler = self._at(state[0], step)
        for name, tensor in zip(self._names, state[1:], strict=False):
            setattr(scheduler, name, _unpacked(tensor, getattr(scheduler, name)))
        generator = torch.Generator("cpu")
        if self._is_stochastic:
            generator.set_state(state[-1])
        moved: Tensor = scheduler.step(
            prediction, self._timestep(scheduler), latents, return_dict=False, **self._random(generator)
        )[0]
        return moved, self._state(state[0], scheduler, generator)

    def clean(self, latents: Tensor, prediction: Tensor, run: Tensor, step: int) -> Tensor:
        """The clean latents that the model's prediction points at before `step`.

        Latents are `signal` times clean ones plus `noise` times noise, and the model's input is `scale` times that; the
        three factors are read off the scheduler's results for 1. v-prediction: section 2.4 of Imagen Video (arXiv
        2210.02303).
        """
        one, none = torch.ones(1), torch.zeros(1)
        signal, noise = self.noised(one, none, run, step).item(), self.noised(none, one, run, step).item()
        scale = self.scaled(one, run, step).item()
        if self._prediction == "epsilon":
            return (latents - noise * prediction) / signal
        return scale * (signal * scale * latents - noise * prediction)

    # ------------------------------------------------------------------------------------------------- the scheduler

    def _make(self, num_inference_steps: int) -> Any:
        """A copy of the scheduler before the first step of a run at full strength."""
        scheduler = copy.copy(self._scheduler)
        scheduler.set_timesteps(num_inference_steps)
        scheduler.scale_model_input(torch.zeros(1), scheduler.timesteps[0])  # some warn if it was never called
        return scheduler

    def _of_run(self, run: Tensor) -> tuple[Any, int, int]:
        """(the cached scheduler of a run, not to be modified, numbers [start, stop) of its timesteps)."""
        num_inference_steps, begin, stop = run.tolist()
        return self._of_steps(num_inference_steps), begin, stop

    def _at(self, run: Tensor, step: int) -> Any:
        """A copy of the scheduler, positioned before `step`, without what earlier steps left in it."""
        kept, begin, _ = self._of_run(run)
        scheduler = copy.copy(kept)
        scheduler._begin_index, scheduler._step_index = begin, begin + step
        return scheduler

    @staticmethod
    def _timestep(scheduler: Any) -> Tensor:
        timestep: Tensor = scheduler.timesteps[scheduler._step_index]
        return timestep

    def _random(self, generator: torch.Generator) -> dict[str, torch.Generator]:
        return {"generator": generator} if self._takes_generator else {}

    def _state(self, run: Tensor, scheduler: Any, generator: torch.Generator) -> State:
        held = (_packed(getattr(scheduler, name)) for name in self._names)
        return (run, *held, generator.get_state()) if self._is_stochastic else (run, *held)

    def _explore(self) -> tuple[tuple[str, ...], bool]:
        """(names of the scheduler's attributes that steps change, without its position; whether it draws noise), found
        by doing a few steps."""
        trial, generator = copy.deepcopy(self._of_steps(TRIAL_STEPS)), torch.Generator("cpu").manual_seed(0)
        drawn, changed = generator.get_state(), set[str]()
        for timestep in trial.timesteps[: TRIAL_STEPS - 1]:
            before = copy.deepcopy(vars(trial))
            trial.step(torch.ones(1, 4, 2, 2), timestep, torch.ones(1, 4, 2, 2), **self._random(generator))
            changed |= {name for name, value in vars(trial).items() if not _is_equal(value, before.get(name))}
        names = tuple(sorted(changed - {"_step_index"}))
        return names, not torch.equal(generator.get_state(), drawn)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of a scheduler's attribute are the same: a number, a table, or a list of these."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _packed(value: Any) -> Tensor:
    """A scheduler's attribute as one tensor: a list's tensors are stacked; None and an empty list give an empty one."""
    if isinstance(value, list):
        tensors = [tensor for tensor in value if tensor is not None]
        return torch.stack(tensors) if tensors else torch.empty(0)
    if value is None:
        return torch.empty(0)
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _unpacked(tensor: Tensor, like: Any) -> Any:
    """The attribute from its tensor. like: its value before a run; a list of None is filled from its end."""
    if isinstance(like, list):
        tensors = list(tensor) if tensor.numel() else []
        return [None] * (len(like) - len(tensors)) + tensors
    if isinstance(like, int):
        return int(tensor)
    return tensor if tensor.numel() else None
