"""Runs the op denoise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from core.failure import Failure
from core.handles import ArrayRef
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.denoise import Denoise
from model_executor.models.base import Family, Row, SamplingState
from model_executor.samplers.sampling import State
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.ops.step_inputs import StepInputs, missed
from model_executor.worker.stores.tensor_store import MissingValueError


def denoise(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Predict, combine guidance, advance; results are stored only after all three. An item whose inputs were never made
    fails alone, or on several ranks with the others: they could not go on with the same rows. Items may be of several
    models that share the denoiser: it computes all rows, and each item's own family does the rest.
    """
    group = context.group
    context.pages.begin_step()
    read = [_read(context, item) if group is None else _step(context, item) for item in items]
    steps = [step for step in read if isinstance(step, _Step)]
    predictions = iter(steps[0].family.predict([row for step in steps for row in step.rows], group) if steps else ())
    guided = [step.family.combine_guidance([next(predictions) for _ in step.rows], step.scale) for step in steps]
    outputs = iter([step.outputs(prediction) for step, prediction in zip(steps, guided, strict=True)])
    return [
        ItemResult(item.request_id, item.node, failure=step)
        if isinstance(step, Failure)
        else _put_step(context, item, *next(outputs), step)
        for item, step in zip(items, read, strict=True)
    ]


def _read(context: WorkerContext, item: Item) -> _Step | Failure:
    try:
        return _step(context, item)
    except MissingValueError as error:
        return missed(item, error)


def _step(context: WorkerContext, item: Item) -> _Step:
    work = item.work
    assert isinstance(work, Denoise)
    inputs = StepInputs(context, item, work)
    facts = work.true_cfg_scale, work.keep_clean, inputs.velocity, work.kept_state
    return _Step(inputs.family, inputs.rows(), inputs.sample, *facts)


def _put_step(context: WorkerContext, item: Item, named: Mapping[str, Tensor], state: State, step: _Step) -> ItemResult:
    """Store what a step has made: latents and sampler state of the next version, and the clean prediction. The last
    step drops what is kept for all of them.
    """
    if step.kept_state is not None:
        context.shared(step.kept_state).copy_(named["latents"])
    tensors = context.put(item, named) + context.put_state(item, state)
    if step.is_last:
        context.store.drop_kept(item.request_id, item.node)
    return ItemResult(item.request_id, item.node, tensors)


@dataclass(frozen=True, slots=True)
class _Step:
    """One request's denoising step: its inputs, and how its prediction advances the sampler."""

    family: Family
    rows: Sequence[Row]  # one for each prompt or class
    sample: SamplingState
    scale: float  # of classifier-free guidance, for two rows
    keep_clean: bool  # whether to output the clean prediction too, for a preview
    velocity: Tensor | None  # of a request with its own pages, after its first step: the last one of every token
    kept_state: ArrayRef | None  # memory for a copy of the latents after it; None: none is kept

    @property
    def is_last(self) -> bool:
        """Whether it is the last step of its loop."""
        return self.sample.step + 2 == len(self.sample.sigmas)

    def outputs(self, prediction: Tensor) -> tuple[dict[str, Tensor], State]:
        """(`latents` after the step and, with keep_clean, `clean`; the sampler's state). Tokens that are not active are
        unchanged, or with own pages go on with their last velocity, since a later step may compute them again.
        prediction: of the active tokens."""
        sample, active, own = self.sample, self.rows[0].active, self.rows[0].own
        if active is not None:
            others = prediction.new_zeros(sample.latents.shape) if self.velocity is None else self.velocity
            prediction = others.index_copy(0, active, prediction)
        moved, state = self.family.advance(sample, prediction)
        named = {"latents": moved}
        if self.keep_clean:
            named["clean"] = self.family.predict_clean(sample, prediction)
        if own is not None:
            return named, (*state, own.latents, prediction)
        return {name: self._of_active(latents) for name, latents in named.items()}, state

    def _of_active(self, moved: Tensor) -> Tensor:
        latents, active = self.sample.latents, self.rows[0].active
        return moved if active is None else latents.index_copy(0, active, moved[active])
