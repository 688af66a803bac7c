"""Runs the op controlnet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import add

from torch import Tensor

from core.handles import TensorKey
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.controlnet import ControlStep, ControlUse
from model_executor.models.controlnet.controlnet import ControlNet, Shown
from model_executor.models.controlnet.residuals import Residuals
from model_executor.parallel.group import Group
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.ops.step_inputs import StepInputs, missed
from model_executor.worker.stores.tensor_store import MissingValueError


def add_controls(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Compute what the ControlNets of these items add to their next steps, request by request, so that what a request
    gets does not depend on the others. An item whose inputs were never made fails alone, or on several ranks with the
    others.
    """
    return [_result(context, item) for item in items]


def _result(context: WorkerContext, item: Item) -> ItemResult:
    work = item.work
    assert isinstance(work, ControlStep)
    try:
        inputs = StepInputs(context, item, work.step)
    except MissingValueError as error:
        if context.group is not None:
            raise
        return ItemResult(item.request_id, item.node, failure=missed(item, error))
    key = TensorKey(item.request_id, item.node, "residuals", item.version)
    made: list[Tensor] = []
    for some in _residuals(context.controlnets[item.model], inputs, work.uses, context.group).series:
        made += some
        context.exchange.publish(key, made)
    if work.step.step + 2 == len(inputs.sample.sigmas):
        context.store.drop_kept(item.request_id, item.node)
    return ItemResult(item.request_id, item.node, (context.store.put_series(key, made),), is_usual=bool(work.uses))


def _residuals(
    nets: Mapping[str, ControlNet], inputs: StepInputs, uses: Sequence[ControlUse], group: Group | None
) -> Residuals:
    """What all ControlNets of a step add together."""
    return reduce(add, _of_each(nets, inputs, uses, group)) if uses else Residuals((), ((),))


def _of_each(
    nets: Mapping[str, ControlNet], inputs: StepInputs, uses: Sequence[ControlUse], group: Group | None
) -> Iterator[Residuals]:
    """What each of them adds, in the order of its first picture: one may see several."""
    rows = inputs.bare_rows()
    for name in dict.fromkeys(use.net for use in uses):
        shown = [_shown(nets[name], inputs, use) for use in uses if use.net == name]
        yield nets[name].residuals(rows, shown, group)


def _shown(net: ControlNet, inputs: StepInputs, use: ControlUse) -> Shown:
    embedded = inputs.control(use.picture, partial(net.embed, inputs.controls[use.picture], use.mode))
    return Shown(embedded, use.mode, use.scale)
