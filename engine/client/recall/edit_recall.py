"""EditRecall: approximate caching for one edit: which states its pictures begin in, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from core.graph.recalling import recalled_name
from core.handles import ArrayRef
from core.messages.engine import EngineRequest
from core.messages.specs.picture_spec import PictureSpec
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel, most_skipped, skips_of
from engine.client.recall.kept_states import Embedding, KeptRun
from engine.client.recall.prompt_embedding import PromptEmbedding
from engine.client.recall.recalled import Recalled
from engine.client.recall.run_key import RunKey
from engine.client.services import Services
from engine.client.sessions.edit_images import EditImage
from engine.client.sessions.prepared_edit import PreparedEdit

_WITHOUT_EFFECT = (
    *("seed", "step_schedule", "mask_aware", "mask_margin", "full_steps", "own_page_steps", "approximate_caching"),
    *("hires_strength", "steps_without_lora", "priority", "timeout"),
)
"""Sampling parameters on which the states of one loop without a mask do not depend, once all others are resolved; the
seed counts apart."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one picture recalls, or keeps."""

    source: KeptRun | None = None  # lent to it
    own: KeptRun | None = None  # which it fills


class EditRecall:
    """Called in this order: embed; with_state and then finished for each picture; give_up; close.

    A picture that recalls a state keeps none: what is approximate is never the source of something else. A seed that is
    given counts: the source must have begun with the same noise, so that the picture is close to the one that the seed
    stands for. Without one, the picture gets the source's seed; who asks for a prompt again then wants another picture,
    so each source serves it once.
    """

    def __init__(
        self, services: Services, prepared: PreparedEdit, levels: Sequence[SkipLevel], embedding: ArrayRef
    ) -> None:
        """levels: of the model. embedding: memory for the prompt's, uint8 [EMBEDDING_BYTES], until `close`."""
        self._services = services
        self._prepared = prepared
        self._levels = levels
        self._prompt = PromptEmbedding(services, embedding)
        self._embedding: Embedding | None = None  # once it is made
        self._plans: dict[str, _Plan] = {}  # id of a request that runs -> its plan

    async def embed(self, request: EngineRequest) -> None:
        """Find out what the prompt is like. request: that of a picture. Raises as `PromptEmbedding.embed`."""
        self._embedding = await self._prompt.embed(request)

    def with_state(self, image: EditImage) -> None:
        """Have a picture begin in an earlier one's state, or else keep its own, if there is one, or room."""
        image.recalled = Recalled(can_recall=True)
        if self._embedding is None:
            return
        plan = self._recalling(image, self._embedding) or self._keeping(image, self._embedding)
        if plan is not None:
            self._plans[image.request.request_id] = plan

    def finished(self, image: EditImage) -> None:
        """Keep the states of a picture that is finished, and give back the one that it began in."""
        plan = self._plans.pop(image.request.request_id, None)
        if plan is None or self._embedding is None:
            return
        if plan.source is not None:
            self._services.states.give_back(plan.source)
        if plan.own is not None:
            self._services.states.add(plan.own, self._embedding, image.request.picture.prompt)

    def give_up(self) -> None:
        """Abort the embedding, if it is not made yet."""
        self._prompt.give_up()

    async def close(self) -> None:
        """Wait until no process can touch its memory any more, and free what pictures have that did not finish. To be
        called when all of them have ended.
        """
        await self._prompt.close()
        for plan in self._plans.values():
            if plan.source is not None:
                self._services.states.give_back(plan.source)
            if plan.own is not None:
                self._services.states.cancel(plan.own)
        self._plans.clear()

    # ------------------------------------------------------------------------------------------------- plans

    def _recalling(self, image: EditImage, embedding: Embedding) -> _Plan | None:
        """Have a picture begin in the state of the run with the most similar prompt; None: none is similar enough."""
        request, states = image.request, self._services.states
        seed = None if self._prepared.edit.sampling.seed is None else image.seed
        nearest = states.nearest(self._key(request.picture), embedding, request.picture.prompt, seed)
        if nearest is None:
            return None
        source, similarity = nearest
        most = most_skipped(self._levels, self._num_steps, similarity)
        skipped = max((steps for steps in source.states if steps <= most), default=0)
        if not skipped:
            return None
        states.lend(source, request.picture.prompt)
        image.seed = source.seed
        image.recalled = Recalled(
            can_recall=True,
            source=source.request_id,
            source_index=source.index,
            similarity=similarity,
            steps_skipped=skipped,
        )
        sampling = without_steps(msgspec.structs.replace(request.picture.sampling, seed=source.seed), skipped)
        spec = msgspec.structs.replace(request.picture, sampling=sampling, state=source.states[skipped])
        image.request = msgspec.structs.replace(
            request, workflow=recalled_name(request.workflow), spec=spec, rounds=(self._num_steps - skipped,)
        )
        return _Plan(source=source)

    def _keeping(self, image: EditImage, embedding: Embedding) -> _Plan | None:
        """Have a picture keep its states; None: there is no room."""
        spec, model = image.request.picture, self._prepared.model
        skips, shape = skips_of(self._levels, self._num_steps), (spec.num_tokens, model.latent_width)
        own = self._services.states.reserve(
            KeptRun(self._key(spec), image.seed, image.request.call_id, image.index), skips, shape, len(embedding)
        )
        if own is None:
            return None
        image.recalled = Recalled(can_recall=True, is_kept=True)
        image.request = msgspec.structs.replace(
            image.request, spec=msgspec.structs.replace(spec, kept_states=dict(own.states))
        )
        return _Plan(own=own)

    @property
    def _num_steps(self) -> int:
        """Computed steps of a picture that skips none."""
        return sum(self._prepared.rounds)

    def _key(self, spec: PictureSpec) -> RunKey:
        edit, any_run = self._prepared, SamplingParams()
        others = {name: getattr(any_run, name) for name in _WITHOUT_EFFECT}
        sampling = msgspec.structs.replace(spec.sampling, **others)
        patches, size = edit.choice.patches, (spec.width, spec.height)
        return RunKey(edit.edit.owner, edit.model.name, patches, edit.graph.name, *size, spec.content_id, sampling)


def without_steps(sampling: SamplingParams, skipped: int) -> SamplingParams:
    """The parameters of the rest of a run: as strength leaves out first steps. skipped: computed steps, fewer than the
    run has. sampling: resolved.
    """
    steps, num_steps = sampling.num_inference_steps, sampling.num_denoising_steps
    assert steps is not None
    left = num_steps - sampling.computed_of_last(num_steps)[skipped]
    return msgspec.structs.replace(sampling, strength=(left - 0.5) / steps)  # half a step less: no rounding adds one
