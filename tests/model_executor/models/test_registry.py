"""All families in the registry implement the whole interface of the runner."""

from __future__ import annotations

from inspect import isabstract

import pytest

from model_executor.models.base import Family
from model_executor.models.registry import FAMILIES


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_every_family_implements_the_interface(pipeline: str) -> None:
    family = FAMILIES[pipeline]
    assert issubclass(family, Family)
    assert not isabstract(family), f"{family.__name__} lacks {sorted(family.__abstractmethods__)}"
