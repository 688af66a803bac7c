"""Messages from an EngineCore to a worker, and back."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from core.config import CacheConfig, ModelConfig, SchedulerConfig
from core.failure import Failure
from core.graph.op import OpWork
from core.graph.work import Work
from core.graph.workflow import Workflow
from core.handles import ArrayRef, EntryRef, LoadedComponent, ModelKey, RankIds, TensorKey, TensorRef, Tier
from core.messages.message import Message
from core.model_info import ModelInfo
from core.page_scheme import PageDtype
from core.run_class import ClassText, RunClass
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults


class PageSpan(msgspec.Struct, frozen=True):
    """A template's pages at a noise level between two keyframes: (1 - weight) * near + weight * far; far is None
    exactly at a keyframe.
    """

    dtype: PageDtype
    near: EntryRef
    far: EntryRef | None
    weight: float


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's part in a batch: which node of its workflow runs, on which tensors."""

    request_id: str
    node: str
    model: str  # name of the model whose family runs it
    work: OpWork  # of the batch's op
    inputs: tuple[TensorRef, ...]
    version: int = 0  # of the values that it makes


class Batch(msgspec.Struct, frozen=True):
    """The unit of dispatch: one op over one or more items, with the same components, on these ranks."""

    id: int
    op: str  # name
    ranks: tuple[int, ...]  # several compute it together
    items: tuple[Item, ...]
    epoch: int = 0  # of their group: it is formed again when this changes, see `model_executor.parallel.groups`
    port: int = 0  # on loopback, where they meet; 0: one rank


class Transfer(msgspec.Struct, frozen=True):
    """Move a value between ranks through shared memory: `source` writes its bytes to ref.handle; readers name the
    handle.
    """

    ref: TensorRef
    source: int


class Delivery(msgspec.Struct, frozen=True):
    """Send a value from rank to rank, beside the engine, as soon as `source` has it: the reader's batch on `target` is
    waiting, or will wait, for it.
    """

    key: TensorKey
    source: int
    target: int


class Free(msgspec.Struct, frozen=True):
    """Drop a value that no later batch reads from the ranks that may have it; "" as node and name: all of a request."""

    key: TensorKey
    ranks: tuple[int, ...]


class PageCopy(msgspec.Struct, frozen=True):
    """Copy an entry's pages from one tier to the next, block after block, in parallel with computing."""

    key: str
    nbytes: int
    block_bytes: int  # bytes of one block's page
    source: Tier
    target: Tier
    host: ArrayRef | None  # its place in the page arena, if one of the tiers is the host
    rank: int = 0  # the worker that copies; if one of the tiers is a device: that worker's


class PageForget(msgspec.Struct, frozen=True):
    """Drop an entry from a rank's device memory, and what the rank remembers of its failed loads."""

    key: str
    rank: int = 0


class Load(msgspec.Struct, frozen=True):
    """Components that ranks drop and then load, beside their other work."""

    ranks: RankIds
    load: tuple[ModelKey, ...]  # not awaited; each is answered by ModelLoaded or ModelFailed
    drop: tuple[ModelKey, ...] = ()


class StepPlan(Message, frozen=True):
    """What one rank does next: free, loads, forget, delete, copies, transfers, batches, in this order; each
    delivery as soon as its value is there. Made by the StepScheduler for all ranks at once; `core.messages.plan_parts`
    gives each its part.
    """

    seq: int
    # The activation cache.
    forget: tuple[PageForget, ...] = ()
    delete: tuple[str, ...] = ()  # files to delete: keys of entries, or of templates (without "-") for all of theirs
    file_rank: int = 0  # the rank that deletes them, which all ranks share
    copies: tuple[PageCopy, ...] = ()  # started, not awaited
    # Requests.
    transfers: tuple[Transfer, ...] = ()  # of values that this rank has
    batches: tuple[Batch, ...] = ()
    deliveries: tuple[Delivery, ...] = ()  # of values that this rank has, or that its batches make
    free: tuple[Free, ...] = ()
    # Models.
    loads: tuple[Load, ...] = ()


class LoadAdapter(Message, frozen=True):
    """Read an adapter's file and put it in use for a model, beside the plans. Answered with an AdapterLoaded. The API
    server sends it to EngineCores, and these to all their ranks.
    """

    request_id: str
    model: str  # name of a served model
    name: str
    path: str  # a safetensors file, or a folder with one
    patch: str = ""  # id that its file must have; "": any, as it is not known yet


class DropAdapter(Message, frozen=True):
    """Free an adapter that no request uses, nor will: it has no name any more. No answer."""

    model: str
    patch: str


class LoadWorkflow(Message, frozen=True):
    """Take a workflow in use, and import its users' classes beside the plans. Answered with a WorkflowLoaded. The API
    server sends it to EngineCores, and these to all their ranks, which need the classes alone; one without classes, for
    pictures, is not sent on.
    """

    request_id: str
    workflow: Workflow  # of a name that no other content has
    classes: tuple[RunClass, ...]  # that it names, without text
    text: ClassText | None = None  # of those that are of a file
    model: str = ""  # name of the served model whose pictures it makes; "": classes compute all of it
    # Role -> name of the model that plays it instead of this one.
    roles: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, workflow: Workflow, classes: Iterable[RunClass], model: ModelInfo | None = None) -> LoadWorkflow:
        """The order to load a checked workflow. classes: those that it names; texts of classes are of one file. model:
        whose pictures it makes, with the roles that others play.
        """
        known = tuple(classes)
        name, roles = ("", {}) if model is None else (model.name, model.roles)
        return cls("", workflow, tuple(each.without_text for each in known), ClassText.of(known), name, roles)

    @property
    def removal(self) -> DropWorkflow:
        """What undoes it."""
        return DropWorkflow(self.workflow.name, self.model)

    @property
    def whole_classes(self) -> tuple[RunClass, ...]:
        """The classes with their text."""
        return self.classes if self.text is None else self.text.put_into(self.classes)


class DropWorkflow(Message, frozen=True):
    """Forget a workflow that no request has, nor will, and free the classes that no other one names. No answer."""

    name: str
    model: str = ""  # see LoadWorkflow


Addition = LoadAdapter | LoadWorkflow
"""What engines and ranks take in use while they serve."""

Removal = DropAdapter | DropWorkflow
"""Undoes an Addition."""


class Shutdown(Message, frozen=True):
    """Exit after the plans already queued."""


ToWorker = StepPlan | Addition | Removal | Shutdown


class WorkerConfig(msgspec.Struct, frozen=True):
    """The configuration of a worker process, which also inherits the file descriptors (channel memory, channel socket,
    arena, page arena, value arena, inboxes of the ranks).
    """

    rank: int
    models: tuple[ModelConfig, ...]
    arena_id: int
    page_arena_id: int
    value_arena_id: int
    cache: CacheConfig
    scheduler: SchedulerConfig = SchedulerConfig()  # limits of a batch
    num_workers: int = 1  # worker processes that share this machine's cores
    group_seconds: float = 5.0  # how long it waits for the other ranks of a batch; less than until it counts as hanging
    device_index: int = 0  # its number among them: the GPU that it uses unless one is configured
    keeper: str = ""  # address of the keeper of weights, see `core.ipc.local_sockets`; "": the worker loads by itself
    measures_costs: bool = False  # its WorkerReady has samples for the cost model
    classes: tuple[RunClass, ...] = ()  # of users, which it imports
    workflows: tuple[Workflow, ...] = ()  # of users, which models may name


class CostSample(msgspec.Struct, frozen=True):
    """A measured batch, from which the cost model starts."""

    model: str  # name
    op: str  # name of its cost line, see Op
    work: Work
    seconds: float
    is_profile: bool = False  # it belongs to a table of latencies; all rows of the batch are alike
    degree: int = 1  # ranks that have computed it together


class WorkerReady(Message, frozen=True):
    """The worker has loaded its first models and accepts plans. Plans say when it is to load the others."""

    rank: int
    models: tuple[ModelInfo, ...]
    samples: tuple[CostSample, ...] = ()  # measured once per model and device, and kept on disk
    device_page_bytes: int = 0  # device memory for pages
    port: int = 0  # on loopback, where groups of which it is the first rank meet; 0: the engine has one rank
    components: tuple[LoadedComponent, ...] = ()
    sizes: tuple[LoadedComponent, ...] = ()  # of every model, loaded or not; predicted bytes of what is not


class ItemResult(msgspec.Struct, frozen=True):
    """The result of one item."""

    request_id: str
    node: str
    tensors: tuple[TensorRef, ...] = ()
    text_tokens: int = 0  # set by text encoding
    prompt_truncated: bool = False  # set by text encoding
    active_tokens: int = 0  # set by segmenting: of the mask with its margin, at least 1
    score: float = 0.0  # set by segmenting: how sure the model is, 0..1
    is_usual: bool = True  # False: less was computed than usual, which says nothing of what later work takes
    sigmas: tuple[float, ...] = ()  # set by image encoding: noise levels before each step to come, and after all
    chosen: str = ""  # set by nodes that choose: the reader that runs
    shapes: dict[str, tuple[int, ...]] = {}  # set by run: result of the workflow -> its shape
    failure: Failure | None = None  # None: it succeeded


class BatchResult(Message, frozen=True):
    """One batch is done; items that failed contain a failure."""

    batch_id: int
    rank: int
    started: float
    seconds: float  # worker time, first to last kernel
    items: tuple[ItemResult, ...]
    # Forward passes; above 1 it failed as a whole and was halved, see model_executor/worker/halving.py.
    num_parts: int = 1


class TransferDone(Message, frozen=True):
    """The tensor is in shared memory at ref.handle, written by `rank`."""

    rank: int
    ref: TensorRef


class PageCopied(Message, frozen=True):
    """A PageCopy is over."""

    rank: int
    key: str
    nbytes: int
    source: Tier
    target: Tier
    ok: bool  # the pages are on the target tier; otherwise the file was missing or damaged, or there was no room
    seconds: float  # duration of the copy


class ModelLoaded(Message, frozen=True):
    """A component that a plan asked for is loaded: batches may use it."""

    rank: int
    loaded: LoadedComponent
    seconds: float  # duration of loading


class ModelFailed(Message, frozen=True):
    """A component that a plan asked for cannot be loaded."""

    rank: int
    key: ModelKey
    failure: Failure


class AdapterLoaded(Message, frozen=True):
    """A LoadAdapter is over on this rank."""

    rank: int
    request_id: str
    patch: str = ""  # the adapter's id
    failure: Failure | None = None  # why it is not in use; None: it is
    defaults: SamplerDefaults = LEFT_OPEN  # that it brings


class WorkflowLoaded(Message, frozen=True):
    """A LoadWorkflow is over on this rank."""

    rank: int
    request_id: str
    failure: Failure | None = None  # why its classes cannot be used; None: they can


class WorkerFailed(Message, frozen=True):
    """The worker could not start or cannot continue; it exits after this message."""

    rank: int
    failure: Failure
    # What is to blame: a request, by id, which fails with it, or a component that took too long to load.
    culprit: str | ModelKey | None = None  # None: nobody knows


AdditionDone = AdapterLoaded | WorkflowLoaded
"""A rank's answer to an Addition."""

FromWorker = (
    WorkerReady | BatchResult | TransferDone | PageCopied | ModelLoaded | ModelFailed | AdditionDone | WorkerFailed
)
