"""Writes docs/flags.md from the table of the server's flags: `python -m tools.flags_page`"""

from __future__ import annotations

from pathlib import Path

from entrypoints.serve_flags import FLAGS, Flag

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """# Flags of the server

`python -m entrypoints.serve`, written from `entrypoints/serve_flags.py` by `python -m tools.flags_page`.
What they are for: models in [models.md](models.md), devices and operators in [gpu.md](gpu.md), the cache and skipping
work in [mask_aware.md](mask_aware.md), batches and policies in [scheduling.md](scheduling.md), several engines and
workers in [routing.md](routing.md) and [parallelism.md](parallelism.md), faults and overload in
[reliability.md](reliability.md), logs and traces in [observability.md](observability.md), address, clients, keys and
limits in [api.md](api.md). `python -m entrypoints.serve --help` lists them, too.
"""


def flags_page() -> str:
    """The page's text: a table for each group of --help."""
    tables = [_table(title, flags) for title, flags in FLAGS.items()]
    return "\n".join([HEAD, *tables])


def _table(title: str, flags: tuple[Flag, ...]) -> str:
    rows = [f"| `{_usage(flag)}` | {_default(flag)} | {_escaped(flag.help)} |\n" for flag in flags]
    return f"## {title[0].upper()}{title[1:]}\n\n| flag | default | |\n| --- | --- | --- |\n{''.join(rows)}"


def _usage(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return flag.name
    low, high = flag.bounds
    limits = f"{low:.12g}..{high:.12g}" if high else flag.metavar or flag.sets.upper()
    return _escaped(f"{flag.name} {'|'.join(flag.values) or limits}")


def _default(flag: Flag) -> str:
    """Flags that are switches, or that add values, are off by default."""
    is_off = isinstance(flag.default, bool) or flag.default in ("", ())
    return "" if is_off else f"`{flag.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(flags_page())
