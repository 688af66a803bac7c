"""What requests ask for, one file per kind. Each kind is tagged, so that it can be told from the others."""

from core.messages.specs.edit_spec import EditSpec
from core.messages.specs.generation_spec import GenerationSpec
from core.messages.specs.mask_spec import MaskSpec
from core.messages.specs.run_spec import RunSpec

Spec = EditSpec | GenerationSpec | MaskSpec | RunSpec

__all__ = ["EditSpec", "GenerationSpec", "MaskSpec", "RunSpec", "Spec"]
