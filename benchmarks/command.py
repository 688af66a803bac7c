"""The options that commands share, under one name, with one meaning."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")

_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "diffusers checkpoint"},
    "dtype": {"choices": DTYPES, "help": "compute type"},
    "threads": {"type": int, "help": "torch threads of each worker"},
    "steps": {"type": int, "help": "denoising steps of an edit"},
    "rounds": {"type": int, "help": "rounds, in which what is compared takes turns"},
    "seed": {"type": int, "help": "of all random draws"},
    "engines": {"flag": "--data-parallel-size", "type": int, "help": "engines of the server"},
    "edits": {"flag": "--num-prompts", "type": int, "help": "edits"},
}


def command(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `--output` and the shared options that have a default here. doc: of the command's module."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in defaults.items():
        option = dict(_OPTIONS[name])
        flag = option.pop("flag", f"--{name}")
        parser.add_argument(flag, dest=name, default=default, **option)
    parser.add_argument("--output", type=_new_file, help="file that the lines of JSON are also written to")
    return parser


def model_flags(args: argparse.Namespace) -> list[str]:
    """Flags of a server, from the shared options."""
    return ["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads)]


def _new_file(name: str) -> Path:
    """An empty file."""
    path = Path(name)
    path.write_text("")
    return path
