"""Model: base class of what nodes of workflows compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from keyword import iskeyword
from typing import Any, ClassVar

from core.errors import WorkflowError
from core.run_class import LOAD_SECONDS, RUN_SECONDS
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.data_type import form_of
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.params import InputParam, OutputParam
from entrypoints.workflows.recorder import recorder_for
from entrypoints.workflows.run_lowering import run_node


class Model(ABC):
    """A model, by what it takes and makes (LegoDiffusion, section 4.1, Table 1).

        class Blur(Model):
            def setup_io(self) -> None:
                self.add_input("image", Image)
                self.add_input("radius", float, required=False)
                self.add_output("blurred", Image)

            def load(self, device: str, dtype: torch.dtype) -> None: ...
            def execute(self, image: torch.Tensor, radius: float = 2.0) -> dict[str, object]: ...

    While a workflow is written, `Blur()(image, radius=3.0)` records a node and returns what stands for its output; of
    several outputs, a named tuple. Workers make the class with the same `settings`, and call `load` once and `execute`
    for each run of a node, as `core.run_class.RunClass` says. Equal classes with equal settings are loaded once,
    however many nodes and workflows use them.
    """

    dtype: ClassVar[str] = "float32"  # that `load` is given
    seconds: ClassVar[float] = RUN_SECONDS  # most that one run may take
    load_seconds: ClassVar[float] = LOAD_SECONDS  # most that `load` may take
    nbytes: ClassVar[int] = 0  # what `load` takes of the device; 0: unknown

    def __init__(self, **settings: str | int | float | bool) -> None:
        """settings: plain values for `load` and `execute` to read, such as the path of a checkpoint."""
        self.settings = settings
        self.inputs: dict[str, InputParam] = {}
        self.outputs: dict[str, OutputParam] = {}
        self.patches: list[Model] = []
        self.setup_io()

    def __call__(self, *values: object, **named: object) -> Any:
        """Record a node. Values and literals are for the inputs in the order of their declaration, or by name."""
        kind = type(self).__name__
        recorder = recorder_for(kind)
        if len(values) > len(self.inputs):
            problem = f"it gets {len(values)} values, and has {len(self.inputs)} inputs"
            raise WorkflowError(f"{kind}: {problem}", node=kind)
        arguments = dict(zip(self.inputs, values, strict=False))
        if twice := next((name for name in named if name in arguments), ""):
            raise WorkflowError(f"{kind}, {twice}: it is given twice", node=kind, input=twice)
        made = recorder.record(self, arguments | named)
        outputs: Any = namedtuple(f"{kind}Outputs", self.outputs)  # type: ignore[misc]
        return made[0] if len(made) == 1 else outputs(*made)

    @abstractmethod
    def setup_io(self) -> None:
        """Declare inputs and outputs, by `add_input` and `add_output`."""

    @abstractmethod
    def load(self, device: str, dtype: Any) -> int | None:
        """Load weights. dtype: a torch.dtype. Returns bytes taken of the device, or None: what attributes take."""

    @abstractmethod
    def execute(self, *args: Any, **inputs: Any) -> dict[str, object]:
        """The outputs by name, of the inputs by name."""

    def add_input(self, name: str, data_type: object, *, required: bool = True, deferred: bool = False) -> None:
        """Declare an input. data_type: see `form_of`. Raises WorkflowError."""
        self._check_name(name)
        self.inputs[name] = InputParam(name, form_of(data_type, type(self).__name__, name), required, deferred)

    def add_output(self, name: str, data_type: object) -> None:
        """Declare an output. data_type: see `form_of`. Raises WorkflowError."""
        self._check_name(name)
        self.outputs[name] = OutputParam(name, form_of(data_type, type(self).__name__, name))

    def _check_name(self, name: object) -> None:
        kind = type(self).__name__
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name[0] == "_":
            problem = "a name is a Python identifier without a leading underscore"
            raise WorkflowError(f"{kind}, {name!r}: {problem}", node=kind)

    def add_patch(self, patch: Model) -> None:
        """Attach an adapter to what is invoked from here on. A class of a user's own takes none: see `lower`."""
        self.patches.append(patch)

    def rm_patch(self, patch: Model) -> None:
        """Remove an adapter. Raises ValueError if it is not attached."""
        self.patches.remove(patch)

    def lower(self, connected: Connected) -> Lowered:
        """What an invocation becomes: here, a run of this class. A model of a family that the engine knows overrides
        this with a node of its own ops. Raises WorkflowError.
        """
        return run_node(self, connected)
