"""RunClass: a user's class, which nodes of the op `run` compute with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import msgspec

from core.handles import ModelKey
from core.validation import (
    check_choice,
    check_decimal,
    check_filled,
    check_integer,
    check_length,
    check_matches,
    conform,
)

RUN_CLASS = "class"
"""Kind of component that a class is, see ModelKey."""

MAX_SOURCE = 1024 * 1024
"""Most characters of a file that classes are in: each of them carries it."""

RUN_SECONDS = 60.0
"""Default time limit of one run of a node."""

LOAD_SECONDS = 600.0
"""Default time limit of a load."""

MAX_RUN_SECONDS = 3600.0
"""Most that a run or a load may be given."""


class ClassText(msgspec.Struct, frozen=True):
    """The text that classes of one file share, of which a message carries one."""

    module: str  # name of the module that the text becomes
    source: str
    file: str

    @classmethod
    def of(cls, classes: Iterable[RunClass]) -> ClassText | None:
        """The text of these classes, of which all that have one are of one file; None: none has one."""
        first = next((each for each in classes if each.source), None)
        return None if first is None else cls(first.module, first.source, first.file)

    def put_into(self, classes: Iterable[RunClass]) -> tuple[RunClass, ...]:
        """The classes, those of its module with the text."""
        own = {"source": self.source, "file": self.file}
        return tuple(msgspec.structs.replace(each, **own) if each.module == self.module else each for each in classes)


class RunClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class of a user, by its import path. Only workers import it; it needs no base class, and is made with the
    keyword arguments `settings`, by default none:

        class Blur:
            def load(self, device: str, dtype: torch.dtype) -> int | None: ...
            def execute(self, image: torch.Tensor, radius: float) -> dict[str, object]: ...

    `load` is called once, in a thread beside what the worker computes; it returns how many bytes it has taken of the
    device, or None for what its attributes (tensors and modules) take. `execute` gets the node's inputs by name and
    returns its outputs by name: bool, int, float, str, and tensors for pictures and tensors. It must make the same
    values of the same inputs, because a node is run again where its values are lost. Raises InvalidRequestError.
    """

    name: str  # the role of the nodes that it runs
    path: str  # module:Class
    # The module's text, if it is a file's that no worker finds by its name. Workers run this text whatever becomes of
    # the file, so that a worker that starts later has the same class. The module's name must change with the text.
    source: str = ""
    file: str = ""  # where the text is from
    settings: dict[str, str | int | float | bool] = {}
    # Most that one run of a node may take. A longer one fails its request, and costs a restart of its worker.
    seconds: float = RUN_SECONDS
    # Most that `load` may take. A longer one counts as failed, and costs a restart of its worker, too.
    load_seconds: float = LOAD_SECONDS
    # What `load` takes of the device, for which others make room before its first load; 0: unknown, nothing is dropped
    # for it. Later loads are expected to take what the last one took.
    nbytes: int = 0
    dtype: str = "float32"  # that `load` is given

    def __post_init__(self) -> None:
        conform(self)
        check_filled("name", self.name)
        check_matches("path", self.path, r"[\w.]+:\w+", "module:Class")
        check_decimal("seconds", self.seconds, 0.001, MAX_RUN_SECONDS)
        check_decimal("load_seconds", self.load_seconds, 0.001, MAX_RUN_SECONDS)
        check_integer("nbytes", self.nbytes, 0)
        check_length("source", self.source, MAX_SOURCE)
        check_choice("dtype", self.dtype, ("float32", "bfloat16", "float16"))

    @property
    def module(self) -> str:
        """Name of the module that it is in."""
        return self.path.partition(":")[0]

    @property
    def without_text(self) -> RunClass:
        """The class without its module's text, see ClassText."""
        return msgspec.structs.replace(self, source="", file="")

    @property
    def key(self) -> ModelKey:
        """The component. Classes of one path, dtype and settings are loaded once."""
        recipe = f"{self.path} {self.dtype} {json.dumps(self.settings, sort_keys=True)}"
        return ModelKey(hashlib.sha256(recipe.encode()).hexdigest()[:16], RUN_CLASS)
