"""Fakes for the scheduler's tests: requests, and workers that record their work instead of computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from core.failure import Failure
from core.graph.op import OPS
from core.graph.selecting import selected_name
from core.graph.workflows.find_mask import FIND_MASK
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.handles import ArrayRef, Artefact, EntryRef, LoadedComponent, ModelKey, TensorKey, TensorRef
from core.messages.canvas import Canvas
from core.messages.engine import EngineRequest
from core.messages.plan_parts import parts_of
from core.messages.specs import EditSpec, MaskSpec
from core.messages.specs.mask_search import MaskedRun, MaskSearch
from core.messages.worker import (
    Batch,
    BatchResult,
    Delivery,
    Item,
    ItemResult,
    ModelLoaded,
    PageCopied,
    PageCopy,
    PageForget,
    StepPlan,
    Transfer,
    TransferDone,
)
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.scheduling.ops.decode import Decode
from core.scheduling.ops.denoise import Denoise
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.ops.prime import Prime
from core.scheduling.ops.run import Run
from core.scheduling.ops.segment import Segment
from core.scheduling.ops.template_encode import TemplateEncode
from core.scheduling.scheduler import StepScheduler
from core.selection import Selection

MODEL = ModelInfo(
    name="m",
    family="flux-fill",
    native_size=256,
    token_size=16,
    latent_width=64,
    max_text_tokens=24,
    default_num_inference_steps=8,
    default_guidance_scale=30.0,
    has_guidance=False,
    has_true_cfg=False,
    device="cpu",
    dtype="float32",
)

PIXELS = ArrayRef(0, 0, (256, 256, 3), "uint8")


def make_edit(
    request_id: str,
    *,
    steps: int = 4,
    partial_images: int = 0,
    priority: int = 0,
    arrival: float = 0.0,
    deadline: float | None = None,
    num_tokens: int = 256,
    owner: str = "",
) -> EngineRequest:
    """A request as from an AsyncEngine; its handles point nowhere."""
    return EngineRequest(
        request_id=request_id,
        model="m",
        arrival=arrival,
        deadline=deadline,
        owner=owner,
        workflow=INPAINT.name,
        rounds=(steps,),
        priority=priority,
        spec=EditSpec(
            prompt="a red shirt",
            sampling=SamplingParams(num_inference_steps=steps, guidance_scale=30.0, seed=0, priority=priority),
            width=256,
            height=256,
            template=PIXELS,
            mask=ArrayRef(0, 0, (256, 256), "uint8"),
            active=ArrayRef(0, 0, (num_tokens,), "int32"),
            content_id="0",
            num_tokens=num_tokens,
            max_text_tokens=24,
            outputs={"picture": Artefact(PIXELS)},
            previews=(Artefact(PIXELS),) * partial_images,
        ),
    )


def make_hires_edit(request_id: str, *, steps: int = 4, strength: float = 0.5, **changes: object) -> EngineRequest:
    """As `make_edit`, in two passes: the first of 128 x 128 pixels and 64 tokens, the second of 256 x 256 and 256
    tokens. strength: of the second. changes: other values in fields of its spec.
    """
    request = make_edit(request_id, steps=steps)
    sampling = msgspec.structs.replace(request.spec.sampling, hires_scale=2.0, hires_strength=strength)
    first = Canvas(
        width=128,
        height=128,
        template=ArrayRef(0, 1, (128, 128, 3), "uint8"),
        mask=ArrayRef(0, 2, (128, 128), "uint8"),
        active=ArrayRef(0, 3, (64,), "int32"),
        num_tokens=64,
        max_text_tokens=24,
    )
    request = with_spec(request, sampling=sampling, canvases={"first": first}, **changes)
    rounds = (MODEL.num_steps(sampling), MODEL.num_steps_of(sampling, strength))
    return msgspec.structs.replace(request, workflow=HIRES.name, rounds=rounds)


RUNS = (MaskedRun(1, True, 0), MaskedRun(100, True, 2), MaskedRun(256, False, 0))
SEARCH = MaskSearch(Selection("a hat"), grow=2, margin=8, runs=RUNS)


def make_selecting_edit(
    request_id: str, *, predicted: int = 50, is_mask_aware: bool = False, **wishes: Any
) -> EngineRequest:
    """As `make_edit`, under a mask that is to be found. predicted: its active tokens."""
    edit = make_edit(request_id, **wishes)
    active = ArrayRef(0, 4096, (predicted,), "int32")
    search = SEARCH if is_mask_aware else msgspec.structs.replace(SEARCH, runs=(MaskedRun(1, False, 0),))
    edit = with_spec(edit, search=search, active=active, is_mask_aware=is_mask_aware)
    return msgspec.structs.replace(edit, workflow=selected_name(INPAINT.name))


def make_mask_request(request_id: str, **wishes: Any) -> EngineRequest:
    """A request for a mask alone."""
    edit = make_selecting_edit(request_id, **wishes)
    fields = {name: getattr(edit.spec, name) for name in MaskSpec.__struct_fields__}
    assert edit.spec.mask is not None
    spec = MaskSpec(**fields | {"outputs": {"mask": Artefact(edit.spec.mask, "mask")}})
    return msgspec.structs.replace(edit, spec=spec, workflow=FIND_MASK.name, rounds=())


def with_spec(request: EngineRequest, **changes: object) -> EngineRequest:
    """The request with other values in fields of its spec."""
    return msgspec.structs.replace(request, spec=msgspec.structs.replace(request.spec, **changes))


def apply(scheduler: StepScheduler, result: BatchResult | TransferDone) -> None:
    """Tell a scheduler what a rank has answered."""
    if isinstance(result, BatchResult):
        scheduler.apply(result)
    else:
        scheduler.apply_transfer(result)


@dataclass
class FakePages:
    """Page arena, devices and disk: records what was written where, so that a wrong read is detected."""

    num_blocks: int = 0
    written: dict[int, tuple[int, str, set[int]]] = field(default_factory=dict)  # offset -> (end, key, blocks there)
    devices: dict[tuple[int, str], set[int]] = field(default_factory=dict)  # (rank, key) -> blocks in its memory
    files: set[str] = field(default_factory=set)
    copies: list[PageCopy] = field(default_factory=list)  # begun and not done
    failed: set[tuple[int, str]] = field(default_factory=set)  # (rank, key) of failed loads that the rank remembers
    device_reads: set[int] = field(default_factory=set)  # ranks that have read pages on their device

    def write(self, ref: EntryRef, blocks: range, rank: int) -> None:
        """A rank writes blocks of an entry; the first one makes it again."""
        if blocks.start == 0:
            self.failed.discard((rank, ref.key))
        if ref.host is None:
            self._write_device(ref.key, blocks, rank)
        else:
            self._write_host(ref.key, ref.host.offset, ref.host.offset + ref.nbytes, blocks)

    def read(self, ref: EntryRef, num_blocks: int, rank: int) -> None:
        """A rank reads the first blocks of an entry, which is not being loaded by it."""
        assert (rank, ref.key) not in self.failed, f"{rank} would wait for a load of {ref.key} that failed"
        if ref.host is None:
            assert (rank, ref.key) in self.devices, f"{ref.key} is not on rank {rank}'s device"
            blocks = self.devices[rank, ref.key]
            self.device_reads.add(rank)
        else:
            end, key, blocks = self.written[ref.host.offset]
            assert (end, key) == (ref.host.offset + ref.nbytes, ref.key), "another entry lies here"
        assert blocks >= set(range(num_blocks)), f"{ref.key} is not full"

    def forget(self, gone: PageForget) -> None:
        self.devices.pop((gone.rank, gone.key), None)
        self.failed.discard((gone.rank, gone.key))

    def is_loading(self, ref: EntryRef, rank: int) -> bool:
        """Whether this rank loads an entry: it waits for the blocks that it reads."""
        return any(copy.key == ref.key and copy.rank == rank and _is_load(copy) for copy in self.copies)

    def is_lost(self, ref: EntryRef, rank: int) -> bool:
        """Whether a load in flight on this rank will fail."""
        is_from_disk = any(copy.key == ref.key and copy.source == "disk" for copy in self.copies)
        return self.is_loading(ref, rank) and is_from_disk and ref.key not in self.files

    def lose(self, rank: int) -> None:
        """A rank dies: what is on its device, and its copies."""
        self.devices = {place: blocks for place, blocks in self.devices.items() if place[0] != rank}
        self.failed = {place for place in self.failed if place[0] != rank}
        self.copies = [copy for copy in self.copies if copy.rank != rank]

    def finish_copy(self, index: int) -> PageCopied:
        """End a copy, successfully if its source exists."""
        copy = self.copies.pop(index)
        assert copy.host is not None
        blocks, on_host = range(copy.nbytes // copy.block_bytes), EntryRef(copy.key, copy.nbytes, copy.host)
        on_device = EntryRef(copy.key, copy.nbytes, None)
        ok = copy.source != "disk" or copy.key in self.files
        match copy.source, copy.target:
            case "disk", "host" if ok:
                self.write(on_host, blocks, copy.rank)
            case "host", "disk":
                self.read(on_host, 1, copy.rank)
                self.files.add(copy.key)
            case "host", "device":
                self.read(on_host, 1, copy.rank)
                self.write(on_device, blocks, copy.rank)
            case "device", "host":
                self.read(on_device, 1, copy.rank)
                self.write(on_host, blocks, copy.rank)
        if not ok:
            self.failed.add((copy.rank, copy.key))
        return PageCopied(copy.rank, copy.key, copy.nbytes, copy.source, copy.target, ok, 0.001)

    def _write_host(self, key: str, start: int, end: int, blocks: range) -> None:
        held = self.written.get(start)
        if held is None or held[:2] != (end, key):
            assert blocks.start == 0, f"block {blocks.start} of {key} comes before its first"
            for other, (other_end, _, _) in list(self.written.items()):
                if other < end and start < other_end:
                    del self.written[other]
            self.written[start] = (end, key, set())
        self.written[start][2].update(blocks)

    def _write_device(self, key: str, blocks: range, rank: int) -> None:
        if blocks.start == 0:
            self.devices[rank, key] = set()
        assert (rank, key) in self.devices, f"block {blocks.start} of {key} comes before its first"
        self.devices[rank, key].update(blocks)


def _is_load(copy: PageCopy) -> bool:
    return copy.source == "disk" or copy.target == "device"


@dataclass
class FakeWorkers:
    """Workers of one engine: run plans in order on each rank, and check for mistakes that would break a real worker."""

    num_ranks: int = 1
    fail: set[str] = field(default_factory=set)  # request ids whose next item fails
    omitted: set[str] = field(default_factory=set)  # names of optional values that are never made
    queues: list[deque[StepPlan]] = field(default_factory=list)
    num_run: list[int | None] = field(
        default_factory=list
    )  # per rank: batches done of the oldest plan; None: not begun
    results: list[list[BatchResult | TransferDone]] = field(default_factory=list)  # per rank: of these
    # Per rank: values sent to it, with their digests; None: it was not made.
    delivered: list[list[tuple[TensorKey, int | None]]] = field(default_factory=list)
    # Per rank: what it is to send when a batch of its plan has made it.
    to_deliver: list[list[Delivery]] = field(default_factory=list)
    # Per rank: the values that it has, each with a digest of all that it was made from.
    stored: list[dict[TensorKey, int]] = field(default_factory=list)
    made: dict[tuple[str, str], int] = field(default_factory=dict)  # (request id, node) -> digest of its last run
    answers: Callable[[Item], Mapping[str, object]] | None = None  # more fields of an item's result
    failed: set[str] = field(default_factory=set)  # request ids with an item that failed for good
    # Offset in the value arena -> the value written there, and its digest.
    moved: dict[int, tuple[TensorKey, int]] = field(default_factory=dict)
    # request id -> node -> step -> the batch that did it
    steps: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    pages: FakePages = field(default_factory=FakePages)
    primed: list[tuple[float, int, int]] = field(default_factory=list)  # noise level, first block, block after the last
    passes: dict[tuple[str, float], int] = field(default_factory=dict)  # (job id, noise level) -> rank of its pass
    encoded_templates: int = 0
    full_blocks: int = 0  # most in any step
    denoised: dict[str, list[int]] = field(default_factory=dict)  # request id -> its steps, as they were done
    dead: set[int] = field(default_factory=set)  # ranks
    num_plans: int = 0  # submitted
    # By rank: plans submitted before it died last.
    num_plans_before: dict[int, int] = field(default_factory=dict)
    num_deaths: int = 0
    loading: list[tuple[int, ModelKey]] = field(default_factory=list)  # ordered and not answered: (rank, component)
    loaded: list[set[ModelKey]] = field(default_factory=list)  # by rank: components

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_ranks)]
        self.num_run = [None] * self.num_ranks
        self.results = [[] for _ in range(self.num_ranks)]
        self.delivered = [[] for _ in range(self.num_ranks)]
        self.to_deliver = [[] for _ in range(self.num_ranks)]
        self.stored = [{} for _ in range(self.num_ranks)]
        self.loaded = [set() for _ in range(self.num_ranks)]

    def submit(self, plan: StepPlan) -> None:
        self.num_plans = plan.seq + 1
        parts = parts_of(plan)
        used = {rank for rank, part in parts.items() if part != StepPlan(plan.seq, free=part.free)}
        assert not used & self.dead, f"rank {used & self.dead} is dead"
        for rank in range(self.num_ranks):
            if rank not in self.dead:
                self.queues[rank].append(plan)

    def lose(self, rank: int) -> None:
        """A rank dies, with all that it has. Ranks that wait for what it was to send are told."""
        self.dead.add(rank)
        self.num_deaths += 1
        self.num_plans_before[rank] = self.num_plans
        begun = self.num_run[rank] is not None
        waiting = list(self.queues[rank])[1 if begun else 0 :]
        unsent = [each for plan in waiting for each in plan.deliveries if self._is_sent_by(rank, each, plan)]
        for each in [*self.to_deliver[rank], *unsent]:
            if each.target not in self.dead:
                self.delivered[each.target].append((each.key, None))
        self.queues[rank].clear()
        self.num_run[rank], self.results[rank], self.to_deliver[rank] = None, [], []
        self.stored[rank], self.delivered[rank], self.loaded[rank] = {}, [], set()
        self.loading = [each for each in self.loading if each[0] != rank]
        self.to_deliver = [[each for each in of if each.target != rank] for of in self.to_deliver]
        self.pages.lose(rank)

    def join(self, rank: int) -> None:
        """A rank that had died was restarted."""
        self.dead.remove(rank)

    def run_one(self, rank: int) -> list[BatchResult | TransferDone]:
        """Run the oldest plan of a rank, if it has one, up to a batch that waits for another rank; a later call goes on
        from there. Its results are returned once it is done.
        """
        if not self.queues[rank]:
            return []
        plan = self.queues[rank][0]
        results = self.results[rank]
        if self.num_run[rank] is None:
            self.begin(plan, rank)
            self.num_run[rank] = 0
            results += [self.export(transfer) for transfer in plan.transfers if transfer.source == rank]
        mine = [batch for batch in plan.batches if rank in batch.ranks]
        for batch in mine[self.num_run[rank] or 0 :]:
            if not self.has_deferred(batch, rank):
                return []
            results.append(self.run(batch, rank))
            self.num_run[rank] = (self.num_run[rank] or 0) + 1
        self.queues[rank].popleft()
        self.num_run[rank], self.results[rank] = None, []
        return results

    def finish_loads(self, nbytes: int = 8) -> list[ModelLoaded]:
        """Load what was ordered. nbytes: of each component."""
        loading, self.loading = self.loading, []
        for rank, key in loading:
            self.loaded[rank].add(key)
        return [ModelLoaded(rank, LoadedComponent(key, nbytes), 0.01) for rank, key in loading]

    def steps_done(self, request_id: str) -> int:
        """Steps that a request has done, of its node `denoise`."""
        return len(self.steps.get(request_id, {}).get("denoise", ()))

    def begin(self, plan: StepPlan, rank: int) -> None:
        """Do what comes before a plan's batches."""
        for free in plan.free:
            if rank in free.ranks:
                self._free(free.key, rank)
        for load in (each for each in plan.loads if rank in each.ranks):
            self.loaded[rank] -= set(load.drop)
            self.loading += [(rank, key) for key in load.load]
        for gone in plan.forget:
            if gone.rank == rank:
                self.pages.forget(gone)
        self.pages.copies += [copy for copy in plan.copies if copy.rank == rank]
        if rank == plan.file_rank:
            self.pages.files -= {key for key in self.pages.files for gone in plan.delete if key.startswith(gone)}
        mine = [batch for batch in plan.batches if rank in batch.ranks]
        to_come = {run for batch in mine for run in _runs(batch)}
        for each in plan.deliveries:
            if not self._is_sent_by(rank, each, plan):
                continue
            if _run_of(each) in to_come:
                self.to_deliver[rank].append(each)
            else:
                self._deliver(each)

    def _is_sent_by(self, rank: int, each: Delivery, plan: StepPlan) -> bool:
        """Whether a rank delivers this to one that has not died since the plan was made."""
        return each.source == rank and plan.seq >= self.num_plans_before.get(each.target, 0)

    def _deliver(self, each: Delivery) -> None:
        """Send what another rank waits for, or that it was not made."""
        self.delivered[each.target].append((each.key, self.stored[each.source].get(each.key)))

    def has_deferred(self, batch: Batch, rank: int) -> bool:
        """Whether all that other ranks send for a batch has come."""
        wanted = _awaited(batch, rank)
        came = [key for key, _ in self.delivered[rank]]
        return all(wanted.count(key) <= came.count(key) for key in wanted)

    def run(self, batch: Batch, rank: int) -> BatchResult:
        """Run a rank's part of a batch, for which all has come, and send what it has made to ranks that wait for it."""
        self._take_deferred(batch, rank)
        result = self._run_batch(batch, rank)
        made = set(_runs(batch))
        mine = [each for each in self.to_deliver[rank] if _run_of(each) in made]
        for each in mine:
            self.to_deliver[rank].remove(each)
            self._deliver(each)
        return result

    def _take_deferred(self, batch: Batch, rank: int) -> None:
        for key in _awaited(batch, rank):
            _, digest = self.delivered[rank].pop([each for each, _ in self.delivered[rank]].index(key))
            if digest is not None:
                self.stored[rank][key] = digest

    def export(self, transfer: Transfer) -> TransferDone:
        """Write a value to shared memory."""
        assert transfer.ref.key in self.stored[transfer.source], "a value is moved from a rank that has none"
        assert transfer.ref.handle is not None
        self.moved[transfer.ref.handle.offset] = transfer.ref.key, self.stored[transfer.source][transfer.ref.key]
        return TransferDone(rank=transfer.source, ref=transfer.ref)

    def check_is_empty(self) -> None:
        """Raise AssertionError if a value or a delivery is left."""
        assert not any(self.stored), "values are left"
        assert not any(self.delivered), "deliveries are left"

    def _free(self, key: TensorKey, rank: int) -> None:
        if key.node:
            self.stored[rank].pop(key, None)
        else:
            self.freed.add(key.request_id)
            mine = [kept for kept in self.stored[rank] if kept.request_id == key.request_id]
            for kept in mine:
                del self.stored[rank][kept]

    def _read(self, ref: TensorRef, rank: int) -> int | None:
        """The digest of an input, which is where its reference says; None if it is not there. It may be missing only if
        an earlier item of its request has failed, behind which this one had been sent, or if it is optional.
        """
        if ref.key in self.stored[rank]:
            return self.stored[rank][ref.key]
        if ref.handle is not None:
            key, digest = self.moved[ref.handle.offset]
            assert key == ref.key, f"{key} lies where {ref.key} should"
            return digest
        is_lost = self.num_deaths and ref.is_deferred
        is_missing = ref.key.request_id in self.failed or ref.key.name in self.omitted or is_lost
        assert is_missing, f"{rank} does not have {ref.key}"
        return None

    def _make(self, item: Item, op: str, rank: int) -> tuple[TensorRef, ...]:
        """The values that the op makes."""
        omitted = self.omitted | ({"clean"} if isinstance(item.work, Denoise) and not item.work.keep_clean else set())
        omitted |= {"picture"} if isinstance(item.work, Decode) and not item.work.is_read else set()
        ports = item.work.makes if isinstance(item.work, Run) else OPS[op].outputs
        names = [port.name for port in ports if port.name not in omitted]
        keys = [TensorKey(item.request_id, item.node, name, item.version) for name in names]
        read = [(ref.input, self._read(ref, rank)) for ref in item.inputs]
        patches = getattr(item.work, "patches", ())
        digest = self.made[item.request_id, item.node] = hash((item.node, item.version, patches, tuple(read)))
        self.stored[rank] |= {key: hash((digest, key.name)) for key in keys}
        return tuple(TensorRef(key, rank, (16,), "float32", 64) for key in keys)

    def _run_batch(self, batch: Batch, rank: int) -> BatchResult:
        items: list[ItemResult] = []
        lost = Failure("pages_lost", "gone") if any(self._waits_in_vain(item, rank) for item in batch.items) else None
        for item in batch.items:
            assert item.request_id not in self.freed, "work for a request whose tensors are gone"
            read = [self._read(ref, rank) is not None or ref.key.name in self.omitted for ref in item.inputs]
            is_lost = not all(read)
            if isinstance(item.work, Denoise):
                self._check_order(item.request_id, item.node, item.work.step, batch.id, is_lost=lost is not None)
                self.full_blocks = max(self.full_blocks, len(item.work.full_blocks))
                self.denoised.setdefault(item.request_id, []).append(item.work.step)
            failure = Failure("engine", "told to") if item.request_id in self.fail or is_lost else lost
            self.failed |= {item.request_id} if failure and failure.kind == "engine" else set()
            sigmas = self._touch_pages(item, rank) if failure is None else ()
            made = self._make(item, batch.op, rank) if failure is None else ()
            more = self.answers(item) if self.answers and failure is None else {}
            if isinstance(item.work, Segment) and failure is None:
                more = {"active_tokens": 40, **more}
            result = ItemResult(item.request_id, item.node, made, 3, sigmas=sigmas, failure=failure)
            items.append(msgspec.structs.replace(result, **more))
        return BatchResult(batch_id=batch.id, rank=rank, started=1.0, seconds=0.01 * len(items), items=tuple(items))

    def _check_order(self, request_id: str, node: str, step: int, batch_id: int, *, is_lost: bool) -> None:
        """A step comes after the one before it, and only in one batch, whose ranks all do it."""
        done = self.steps.setdefault(request_id, {}).setdefault(node, {})
        assert self.num_deaths or step == 0 or step - 1 in done, "steps out of order"
        assert self.num_deaths or done.get(step, batch_id) == batch_id, f"step {step} is done twice"
        if not is_lost:
            done[step] = batch_id

    def _touch_pages(self, item: Item, rank: int) -> tuple[float, ...]:
        """Read and write the cache as a worker would; returns the noise levels of an image encoding."""
        match item.work:
            case ImageEncode() as work:
                if not self.num_deaths:  # else the steps may go on from where they were
                    self.steps.pop(item.request_id, None)
                steps = work.num_inference_steps
                return tuple(1 - i / steps for i in range(steps - work.num_denoising_steps, steps + 1))
            case TemplateEncode() as work:
                self.pages.write(work.out, range(1), rank)
                self.encoded_templates += 1
            case Prime() as work:
                self.pages.read(work.latents, 1, rank)
                self.pages.write(work.out, range(*work.blocks), rank)
                self._check_passes(item.request_id, work, rank)
                self.primed.append((work.sigma, *work.blocks))
            case Denoise(pages=span) if span is not None:
                for entry in (span.near, span.far):
                    if entry is not None and not self.pages.is_loading(entry, rank):
                        self.pages.read(entry, self.pages.num_blocks, rank)
            case Decode(template_latents=latents) if latents is not None:
                self.pages.read(latents, 1, rank)
        return ()

    def _check_passes(self, job_id: str, work: Prime, rank: int) -> None:
        """A pass goes on where its hidden state is."""
        first, _ = work.blocks
        if first == 0:
            self.passes[job_id, work.sigma] = rank
        assert self.passes[job_id, work.sigma] == rank, "the hidden state is on another rank"

    def _waits_in_vain(self, item: Item, rank: int) -> bool:
        """Whether a step reads pages whose load will fail."""
        match item.work:
            case Denoise(pages=span) if span is not None:
                return any(entry is not None and self.pages.is_lost(entry, rank) for entry in (span.near, span.far))
        return False


def _runs(batch: Batch) -> list[tuple[str, str, int]]:
    return [(item.request_id, item.node, item.version) for item in batch.items]


def _run_of(delivery: Delivery) -> tuple[str, str, int]:
    return delivery.key.request_id, delivery.key.node, delivery.key.version


def _awaited(batch: Batch, rank: int) -> list[TensorKey]:
    """The values that other ranks send this one for a batch."""
    refs = [ref for item in batch.items for ref in item.inputs if ref.is_deferred]
    return [ref.key for ref in refs if ref.rank != rank]
