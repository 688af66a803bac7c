"""`python -m benchmarks.evidence.effective_lines`: our lines of the techniques in LegoDiffusion's table 3.

Counted are lines with code: no blank ones, comments or docstrings. A technique's parts are the files and functions that
nothing else needs. What they share with other techniques (messages, the table of values, the planner's lanes and
groups) is not among them, as the runtime is not in the paper's figures.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.load.server import ROOT
from benchmarks.report import print_report

PARTS: Mapping[str, Sequence[str]] = {
    "latent_parallel": (
        "model_executor/parallel/group.py",
        "model_executor/parallel/groups.py",
        "model_executor/parallel/rows.py",
        "model_executor/models/transformer/denoiser.py:Denoiser._forward_together",
        "model_executor/models/transformer/denoiser.py:Denoiser._shares",
        "model_executor/models/transformer/sequence.py",
        "model_executor/worker/runner.py:Runner._attempt_together",
    ),
    "controlnet_parallel": (
        "core/scheduling/policies/planner/lane_pass.py:LanePass._rank_beside",
        "core/scheduling/policies/planner/lane_pass.py:LanePass._is_worth_a_rank",
        "core/scheduling/values/inputs.py:deliveries",
        "model_executor/worker/orders.py:Orders.newly_come",
        "model_executor/worker/ops/context.py:WorkerContext.read_parts",
        "model_executor/worker/stores/exchange.py",
    ),
    "asynchronous_adapters": (
        "core/late_adapters.py",
        "core/scheduling/requests/request.py:Request.awaits_adapters",
        "core/scheduling/requests/request.py:Request.stands_still",
        "core/scheduling/requests/request.py:Request.use_adapters",
        "core/scheduling/requests/request.py:Request._step_of",
        "core/scheduling/requests/request.py:Request.first_step",
        "core/scheduling/requests/request.py:Request._first_steps",
        "core/scheduling/scheduler.py:StepScheduler.use_adapters",
        "core/scheduling/scheduler.py:StepScheduler._tell_adapters",
        "engine/client/resolve/loading_adapters.py",
        "engine/client/resolve/served_models.py:ServedModels._named",
        "engine/client/resolve/served_models.py:ServedModels.loaded",
        "engine/client/sessions/edit_session.py:EditSession._use_adapters",
        "engine/client/sessions/runtime_adapters.py:RuntimeAdapters.begin",
        "engine/client/sessions/runtime_adapters.py:RuntimeAdapters._load_late",
        "engine/client/sessions/runtime_adapters.py:RuntimeAdapters._serve_late",
        "engine/router/routed_request.py:RoutedRequest.use_adapters",
        "engine/router/routed_request.py:RoutedRequest.note_adapters",
        "engine/router/routed_request.py:RoutedRequest.note_shown",
        "engine/router/routed_request.py:RoutedRequest._replace",
        "engine/router/router.py:Router.use_adapters",
        "entrypoints/workflows/optimizations/asynchronous_adapters.py",
    ),
}
"""Technique -> its parts: a file, or a file and a function in it."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> None:
    result = {name: sum(map(_lines_of, parts)) for name, parts in PARTS.items()}
    rows = [(name.replace("_", " "), f"{number} lines") for name, number in result.items()]
    print_report("effective lines", rows, {"benchmark": "effective_lines"} | result)


def _lines_of(part: str) -> int:
    file, _, name = part.partition(":")
    return effective_lines((ROOT / file).read_text(), name)


def effective_lines(source: str, name: str = "") -> int:
    """Lines with code of a text, or of a class or function in it, `Class.function`. Raises ValueError if there is
    none."""
    tree: ast.AST = ast.parse(source)
    for step in name.split(".") if name else ():
        tree = _member(tree, step)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    if isinstance(tree, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = min([tree.lineno, *(each.lineno for each in tree.decorator_list)])
        lines &= set(range(first, (tree.end_lineno or first) + 1))
    return len(lines.difference(_docstrings(tree)))


def _member(tree: ast.AST, name: str) -> ast.AST:
    found = (each for each in ast.iter_child_nodes(tree) if getattr(each, "name", "") == name)
    member = next(found, None)
    if member is None:
        raise ValueError(f"there is no {name}")
    return member


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """The lines of strings that stand alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


if __name__ == "__main__":
    main()
