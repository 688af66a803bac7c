"""This tree against another commit: `make compare REF=<commit>`.

Pictures: every family, exact and mask-aware, in float32 and bfloat16, alone and in a batch, on two ranks that compute
each step together, some families on up to three ranks, compared by hash: with the other tree's, and this tree's with
those that it makes alone on one rank. Speeds: two servers, asked in turns. Exits with status 1 if a picture differs;
speeds are printed, since a busy machine says little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.command import command
from benchmarks.compare import pictures
from benchmarks.compare.checkpoints import make_all
from benchmarks.compare.speed import Speed, compare_speeds, measures
from benchmarks.compare.trees import Tree, this_tree, tree_of
from benchmarks.load.server import end_with_parent
from benchmarks.load.workload import IMAGE
from benchmarks.report import print_report


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        this, ref = this_tree(folder), tree_of(args.ref, folder)
        models = make_all(folder)
        differing = [] if args.only == "speed" else _compare_pictures(this, ref, models)
        if args.only != "pictures":
            _print_speeds(compare_speeds(this, ref, measures(models["flux_fill"]), args.rounds), args.output)
    sys.exit(1 if differing else 0)


def _compare_pictures(this: Tree, ref: Tree, models: Mapping[str, str]) -> list[str]:
    """The names of pictures that differ, printed too."""
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda tree: _hashes(tree, models), (this, ref))
    common = ours.keys() & theirs.keys()
    differing = sorted(name for name in common if ours[name] != theirs[name])
    differing += sorted(name for name, digest in ours.items() if digest != ours[_undisturbed(name)])
    print(f"pictures: {len(common) - len(differing)} of {len(common)} are the same as in {ref.name}")
    for name in differing:
        print(f"  differs: {name}")
    return differing


def _undisturbed(name: str) -> str:
    """Name of the same picture made alone by an engine with one worker."""
    *kind, _ = (part for part in name.split("/") if not part.endswith(" ranks"))
    return "/".join([*kind, "alone"])


def _hashes(tree: Tree, models: Mapping[str, str]) -> dict[str, str]:
    command = [
        sys.executable,
        "-P",
        pictures.__file__,
        str(IMAGE),
        *(f"{name}={path}" for name, path in models.items()),
    ]
    environment = tree.environment | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, cwd=tree.root, env=environment, stdout=subprocess.PIPE, check=True, preexec_fn=end_with_parent
    ).stdout
    found: dict[str, str] = json.loads(output)
    return found


def _print_speeds(speeds: Sequence[Speed], output: Path | None) -> None:
    rows = [(speed.measure.name, f"{speed.ratio:.3f} +- {speed.spread:.3f}") for speed in speeds]
    print_report(
        "time by that of the other commit", rows, {speed.measure.name: speed.ratio for speed in speeds}, output
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command(__doc__, rounds=15)
    parser.add_argument("ref", help="commit to compare with")
    parser.add_argument("--only", choices=("pictures", "speed"), help="leave the other half out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
