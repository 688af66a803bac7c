"""Sampling with the schedulers of UNets, which count in the timesteps that the model was trained at: DDIM, PNDM, Euler,
Euler ancestral, DPM-Solver++. On named tensors, as in sampling.py.

A request's run is two integers, from which diffusers makes its timesteps. They are the head of its `State`; behind them
lies what the scheduler keeps from one step to the next, each of its attributes as one tensor. For each step a scheduler
object is made from them, so that its arithmetic is diffusers' own.

The noise level of a timestep is its share of all training timesteps: it falls from 1 to 0 like that of flow matching,
and tells the model its timestep.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache, lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from model_executor.samplers.sampling import State

CACHED_RUNS = 64
"""Numbers of steps whose schedulers are kept; each is a few arrays of as many numbers."""

TRIAL_STEPS = 4
"""Of the run that tells what a scheduler keeps; none keeps more than three steps' predictions before it has all."""

PREDICTIONS = ("epsilon", "v_prediction")


class TimestepSampling:
    """The scheduler of a checkpoint. scheduler: one of diffusers', as it was loaded; it is kept. Raises ValueError for
    a model that predicts other than noise or velocity, and for PNDM's Runge-Kutta steps."""

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

    @property
    def extra_steps(self) -> int:
        """Calls of the model in a run beyond one for each step (and two for each but the last, of a second-order
        solver): PNDM takes the second step twice."""
        return len(self._of_steps(TRIAL_STEPS).timesteps) - self.order * (TRIAL_STEPS - 1) - 1

    @property
    def min_steps(self) -> int:
        """Fewest steps of a run of which the above holds: a run of one has no second step."""
        return next(n for n in count(1) if len(self._of_steps(n).timesteps) == self._num_calls(n))

    def _num_calls(self, num_steps: int) -> int:
        return self.order * (num_steps - 1) + 1 + self.extra_steps

    def run(self, num_inference_steps: int, num_denoising_steps: int) -> Tensor:
        """int64 [2]: the steps of a whole run, and how many timesteps are left out at its start, as with strength < 1
        by diffusers' `get_timesteps`."""
        return torch.tensor([num_inference_steps, (num_inference_steps - num_denoising_steps) * self.order])

    def noise_levels(self, run: Tensor) -> Tensor:
        """Of each step, and a last 0: float32 [steps + 1]. Times `num_train_timesteps` they are the timesteps."""
        scheduler, begin = self._of_run(run)
        levels = scheduler.timesteps[begin:].double() / self.num_train_timesteps
        return torch.cat([levels, levels.new_zeros(1)]).float()

    def begin(self, run: Tensor, generator: torch.Generator) -> State:
        """The state before the first step. generator: the request's, after what was drawn for its first latents."""
        return self._state(run, self._of_run(run)[0], generator)

    # ------------------------------------------------------------------------------------------------------- steps

    def pure_noise(self, noise: Tensor, run: Tensor) -> Tensor:
        """Standard normal noise as the latents that a whole run starts from."""
        started: Tensor = noise * self._of_run(run)[0].init_noise_sigma
        return started

    def noised(self, clean: Tensor, noise: Tensor, run: Tensor, step: int) -> Tensor:
        """Clean latents as they are before `step`; after the last step as they are."""
        scheduler, begin = self._of_run(run)
        timestep = scheduler.timesteps[begin + step : begin + step + 1]
        if not len(timestep):
            return clean
        noised: Tensor = self._at(run, step).add_noise(clean, noise, timestep)
        return noised

    def shares(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """What latents of unit variance have of clean ones and of noise at a noise level, between timesteps
        interpolated; each like `level`."""
        timestep = (level.float() * self.num_train_timesteps).clamp(max=self.num_train_timesteps - 1)
        alphas = self._alphas(level.device)
        below = timestep.long().clamp(max=len(alphas) - 2)
        alpha = torch.lerp(alphas[below], alphas[below + 1], timestep - below)
        return alpha.sqrt(), (1 - alpha).sqrt()

    def scaled(self, latents: Tensor, run: Tensor, step: int) -> Tensor:
        """Latents before `step` as the model takes them: of unit variance, whatever the scheduler keeps."""
        scheduler = self._at(run, step)
        scaled: Tensor = scheduler.scale_model_input(latents, self._timestep(scheduler))
        return scaled

    def step(self, latents: Tensor, prediction: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        """Latents and state after `step`, counted from the run's first; nothing that is passed in changes. latents,
        prediction: of any one shape, in which noise is drawn too."""
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

        By what the scheduler makes of 1: latents are `signal` times the clean ones and `noise` times noise, and the
        model takes them times `scale`. v-prediction: section 2.4 of Imagen Video (arXiv 2210.02303).
        """
        one, none = torch.ones(1), torch.zeros(1)
        signal, noise = self.noised(one, none, run, step).item(), self.noised(none, one, run, step).item()
        scale = self.scaled(one, run, step).item()
        if self._prediction == "epsilon":
            return (latents - noise * prediction) / signal
        return scale * (signal * scale * latents - noise * prediction)

    # ------------------------------------------------------------------------------------------------- the scheduler

    def _make(self, num_inference_steps: int) -> Any:
        """A scheduler of its own before a whole run."""
        scheduler = copy.copy(self._scheduler)
        scheduler.set_timesteps(num_inference_steps)
        scheduler.scale_model_input(torch.zeros(1), scheduler.timesteps[0])  # some warn where this was never done
        return scheduler

    def _of_run(self, run: Tensor) -> tuple[Any, int]:
        """The scheduler before a whole run, not to be changed, and how many timesteps are left out."""
        num_inference_steps, begin = run.tolist()
        return self._of_steps(num_inference_steps), begin

    def _at(self, run: Tensor, step: int) -> Any:
        """A scheduler of its own, which stands before `step` and knows of no other."""
        kept, begin = self._of_run(run)
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
        """The attributes that steps change in the scheduler besides its place, and whether it draws noise: by doing
        some."""
        trial, generator = copy.deepcopy(self._of_steps(TRIAL_STEPS)), torch.Generator("cpu").manual_seed(0)
        drawn, changed = generator.get_state(), set[str]()
        for timestep in trial.timesteps[: TRIAL_STEPS - 1]:
            before = {name: repr(value) for name, value in vars(trial).items()}
            trial.step(torch.ones(1, 4, 2, 2), timestep, torch.ones(1, 4, 2, 2), **self._random(generator))
            changed |= {name for name, value in vars(trial).items() if repr(value) != before.get(name)}
        names = tuple(sorted(changed - {"_step_index"}))
        return names, not torch.equal(generator.get_state(), drawn)


def _packed(value: Any) -> Tensor:
    """An attribute as one tensor. None and an empty list have no elements; a list's tensors lie behind one another."""
    if isinstance(value, list):
        tensors = [tensor for tensor in value if tensor is not None]
        return torch.stack(tensors) if tensors else torch.empty(0)
    if value is None:
        return torch.empty(0)
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _unpacked(tensor: Tensor, like: Any) -> Any:
    """The attribute again. like: what it is before a run; a list that has None in it there is filled from its end."""
    if isinstance(like, list):
        tensors = list(tensor) if tensor.numel() else []
        return [None] * (len(like) - len(tensors)) + tensors
    if isinstance(like, int):
        return int(tensor)
    return tensor if tensor.numel() else None
