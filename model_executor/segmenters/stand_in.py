"""Copies modules of transformers with some children replaced, for what their forward passes cannot be asked for."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def with_children(module: Any, **children: nn.Module) -> Any:
    """A copy that shares the module's weights and has these children instead of its own of these names. The module
    stays as it is, so that threads may use it meanwhile."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin
