"""Settings of the libraries that read checkpoints."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import diffusers.utils.logging
import transformers.utils.logging
from torch import nn
from transformers import PreTrainedModel


def quiet_libraries() -> None:
    """Turn off progress bars and advice of the libraries, which do not belong in a server's log; their errors still
    arrive as exceptions."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def register_classes(module: nn.Module) -> None:
    """Let transformers know the classes of a module that was made in another process. Their constructor notes, by
    class, which hidden states can be asked for; without it there are none."""
    found: dict[Any, PreTrainedModel] = {
        type(part): part for part in module.modules() if isinstance(part, PreTrainedModel)
    }
    for cls, part in found.items():
        PreTrainedModel.__init__(cls.__new__(cls), deepcopy(part.config))
