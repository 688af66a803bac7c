"""``python -m entrypoints.workflows.comfy graph.json -o workflow.py``: writes a ComfyUI graph in the language."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.errors import StencilError
from core.ipc.logs import one_line
from entrypoints.workflows.comfy.graph_file import GraphFile


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status: 0, or 1 after an error, printed as one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m entrypoints.workflows.comfy", description="Write a graph in the language."
    )
    parser.add_argument("graph", type=Path, help="a graph in the form of ComfyUI's API")
    parser.add_argument("-o", "--output", type=Path, help="the file to write; default: standard output")
    args = parser.parse_args(argv)
    try:
        text = GraphFile.read(args.graph).program
        if args.output is None:
            sys.stdout.write(text)
        else:
            args.output.write_text(text)
    except (StencilError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
