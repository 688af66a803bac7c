"""The compiler's import is deferred until something is compiled, and that works then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from model_executor.deferred_compiler import defer_compiler
defer_compiler()
from torch._dynamo import allow_in_graph, assume_constant_result
import torch._dynamo._trace_wrapped_higher_order_op
def double(x):
    return 2 * x
for mark in (allow_in_graph, assume_constant_result, torch.compiler.disable):
    assert mark(double) is double
assert torch.compiler.disable()(double) is double
assert not torch.compiler.is_compiling()
assert "torch._dynamo.convert_frame" not in sys.modules
{use}
assert "torch._dynamo.convert_frame" in sys.modules
assert torch.compile(double, backend="eager")(torch.ones(1)).item() == 2
assert torch._dynamo.disable is not torch.compiler.disable
assert sys.modules["torch._dynamo.utils"].__spec__.name == "torch._dynamo.utils"
"""


def run(use: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(use=use)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=120)


def test_compiling_imports_it() -> None:
    run('assert torch.compile(double, backend="eager")(torch.ones(1)).item() == 2')


def test_a_submodule_imports_it_first() -> None:
    run("import torch._dynamo.utils")
