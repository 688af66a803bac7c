"""The table of flags against the settings that it names, and against the arguments of ImageEngine."""

from __future__ import annotations

import inspect

import pytest

from core.config import MAX_ENGINES, ModelConfig
from entrypoints.image_engine import ImageEngine
from entrypoints.serve_flags import FLAGS, Flag

ALL = [flag for flags in FLAGS.values() for flag in flags]
OWN_ARGUMENTS = {"self", "model", "models", "loras", "cache", "skip_levels", "classes", "workflows"}
"""Of ImageEngine: what flags name in another form, or what a server has no use for."""


BESIDE = {"--data-parallel-size-local": {"data_parallel_size": MAX_ENGINES}}
"""Flag -> what its bounds need beside it."""


def test_no_two_flags_set_the_same() -> None:
    assert len({flag.sets for flag in ALL}) == len({flag.name for flag in ALL}) == len(ALL)


@pytest.mark.parametrize("flag", [flag for flag in ALL if flag.config and flag.bounds[1]], ids=lambda flag: flag.name)
def test_a_setting_takes_the_bounds_of_its_flag(flag: Flag) -> None:
    assert flag.config is not None
    assert flag.parse is not None
    for bound in flag.bounds:
        value = flag.parse(f"{bound:.12g}")
        settings = {**BESIDE.get(flag.name, {}), flag.sets: value}
        assert getattr(flag.config(**settings), flag.sets) == value == bound


@pytest.mark.parametrize("flag", [flag for flag in ALL if flag.config is ModelConfig and flag.choices])
def test_a_setting_that_is_plain_text_takes_the_choices_of_its_flag(flag: Flag) -> None:
    for choice in flag.choices:
        assert getattr(ModelConfig(**{flag.sets: choice}), flag.sets) == choice


def test_the_arguments_of_image_engine_are_settings_with_their_defaults() -> None:
    arguments = inspect.signature(ImageEngine.__init__).parameters
    assert arguments.keys() >= OWN_ARGUMENTS
    defaults = {flag.sets: flag.default for flag in ALL}
    for name in arguments.keys() - OWN_ARGUMENTS:
        assert arguments[name].default == defaults[name], name
