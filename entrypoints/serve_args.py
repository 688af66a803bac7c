"""Parses the server's command line into ServeOptions. A bad flag is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from core.config import (
    EMBEDDED_MODEL,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    SchedulerConfig,
    StencilConfig,
)
from core.errors import ConfigError, InvalidRequestError
from core.ipc.logs import one_line
from core.scheduling.policies import make_policy
from entrypoints.api_keys import KeySource, read_key_file
from entrypoints.catalog import Catalog, read_catalog
from entrypoints.serve_flags import FLAGS, Flag, flags_of
from entrypoints.serve_options import ServeOptions


def parse_options(argv: Sequence[str] | None) -> ServeOptions:
    """Parse `argv`, by default the process's arguments. Exits with status 2 for a bad flag, 0 after --help."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
        config = _config(args)
        key_source = KeySource(tuple(args.api_keys), tuple(args.api_key_files), os.environ)
        api_keys = key_source.read()
        admin_keys = tuple(read_key_file(Path(args.admin_key_file))) if args.admin_key_file else ()
    except ConfigError as error:
        parser.error(str(error))
    except InvalidRequestError as error:  # of a text that only its setting checks
        parser.error(f"argument {_flag_of(error.param)}: {error}")
    keys: dict[str, Any] = {"api_keys": api_keys, "key_source": key_source, "admin_keys": admin_keys}
    return ServeOptions(config=config, **keys, **_values(ServeOptions, args))


def _flag_of(setting: str | None) -> str:
    """The flag that sets a field of the configuration."""
    return next((flag.name for flags in FLAGS.values() for flag in flags if flag.sets == setting), f"--{setting}")


def _config(args: argparse.Namespace) -> StencilConfig:
    """The engine's configuration. Raises ConfigError for flags that exclude each other, and for a policy that cannot be
    made.
    """
    cache = CacheConfig(**_values(CacheConfig, args))
    make_policy(args.policy)
    scheduler = SchedulerConfig(**_values(SchedulerConfig, args))
    models, engines = _catalog(args)
    settings = _values(EngineConfig, args)
    engine = EngineConfig(models=models, engines=engines, scheduler=scheduler, cache=cache, **settings)
    image = ImageConfig(**_values(ImageConfig, args))
    return StencilConfig(engine=engine, image=image, **_values(StencilConfig, args))


def _values(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a class of configuration that flags set."""
    values = {flag.sets: getattr(args, flag.sets) for flag in flags_of(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _catalog(args: argparse.Namespace) -> Catalog:
    """The models to serve, and which engines have which. Raises ConfigError."""
    common = ModelConfig(**_values(ModelConfig, args))
    named = args.models or [("", EMBEDDED_MODEL)]
    _check_flags_of_one(args, is_alone=len(named) == 1 and not args.catalog)
    if args.catalog:
        return read_catalog(Path(args.catalog), common)
    adapters = tuple(args.loras)
    models = tuple(
        msgspec.structs.replace(
            common, model=model, served_model_name=name or args.served_model_name, adapters=adapters
        )
        for name, model in named
    )
    return Catalog(models, {})


def _check_flags_of_one(args: argparse.Namespace, *, is_alone: bool) -> None:
    """Raises ConfigError for flags that belong to one model, where there may be several."""
    if args.catalog and args.models:
        raise ConfigError("--catalog lists the models; leave --model out, or list that model there too")
    if is_alone:
        if args.served_model_name and args.models and args.models[0][0]:
            raise ConfigError("--served-model-name and --model NAME=... both name the model; give one of them")
        return
    if args.served_model_name:
        raise ConfigError(
            "--served-model-name is the name of one model; with several give --model NAME=DIR_OR_HUB_ID, or `name` in "
            "the catalog"
        )
    if args.loras:
        raise ConfigError("--lora is an adapter of one model; with several list each model's as `loras` in a --catalog")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"stencil: error: {one_line(message)} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default to each flag's help, unless it is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in ("", None, []) else action.help


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m entrypoints.serve",
        description="Serve masked image editing behind the OpenAI images API.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(flag.name, **_keywords(flag))
    return parser


def _keywords(flag: Flag) -> dict[str, Any]:
    """What argparse needs to know of a flag."""
    default = list(flag.default) if flag.repeats else flag.default
    keywords = {"dest": flag.sets, "default": default, "help": flag.help}
    if isinstance(default, bool):
        return keywords | {"action": "store_false" if default else "store_true"}
    action = "append" if flag.repeats else "store"
    return keywords | {"action": action, "type": flag.parse, "choices": flag.values or None, "metavar": flag.metavar}
