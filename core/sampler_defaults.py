"""SamplerDefaults: how requests are sampled that leave it open, as a model's catalog entry or an adapter says."""

from __future__ import annotations

import msgspec

from core.sampling_params import SamplingParams
from core.validation import conform


class SamplerDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: left open here, too. Raises InvalidRequestError for the values that SamplingParams refuses."""

    num_inference_steps: int | None = None  # with sigmas: their number
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None  # for a request with only a negative prompt
    shift: float | None = None
    sigmas: tuple[float, ...] | None = None  # for requests of as many steps

    def __post_init__(self) -> None:
        conform(self)
        SamplingParams(**msgspec.structs.asdict(self))
        if self.sigmas is not None:
            msgspec.structs.force_setattr(self, "num_inference_steps", len(self.sigmas))

    def over(self, others: SamplerDefaults) -> SamplerDefaults:
        """These, and those of the others that these leave open. Noise levels of another number of steps are dropped."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if self.num_inference_steps not in (None, others.num_inference_steps):
            own.setdefault("sigmas", None)
        return msgspec.structs.replace(others, **own)

    def why_not(self, *, has_shift: bool, takes_sigmas: bool, min_steps: int) -> str:
        """What of these a model's scheduler cannot do, and why; "": it can do all. The arguments are ModelInfo's."""
        for name, value, can in (("shift", self.shift, has_shift), ("sigmas", self.sigmas, takes_sigmas)):
            if value is not None and not can:
                return f"{name}: the model's scheduler takes none; leave it out"
        steps = self.num_inference_steps
        if steps is not None and self.shift is None and steps < min_steps:
            return f"num_inference_steps: its sampler takes at least {min_steps} steps"
        return ""


LEFT_OPEN = SamplerDefaults()
