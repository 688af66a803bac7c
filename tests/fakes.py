"""Fakes for the scheduler's tests: requests, and workers that record their work instead of computing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from core.failure import Failure
from core.graph.op import OPS
from core.graph.workflow import INPAINT
from core.handles import ArrayRef, EntryRef, TensorKey, TensorRef
from core.messages.engine import Canvas, EditSpec, EngineRequest
from core.messages.worker import (
    Batch,
    BatchResult,
    Item,
    ItemResult,
    PageCopied,
    PageCopy,
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
from core.scheduling.ops.template_encode import TemplateEncode

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
            pixels=(PIXELS,) * (partial_images + 1),
        ),
    )


def make_hires_edit(request_id: str, *, steps: int = 4, strength: float = 0.5, **changes: object) -> EngineRequest:
    """As `make_edit`, in two passes: the first of 128 x 128 pixels and 64 tokens, the second of 256 x 256 and 256
    tokens. strength: of the second. changes: other values in fields of its spec.
    """
    request = make_edit(request_id, steps=steps)
    sampling = msgspec.structs.replace(request.spec.sampling, hires_scale=2.0, hires_strength=strength)
    first_pass = Canvas(
        width=128,
        height=128,
        template=ArrayRef(0, 1, (128, 128, 3), "uint8"),
        mask=ArrayRef(0, 2, (128, 128), "uint8"),
        active=ArrayRef(0, 3, (64,), "int32"),
        num_tokens=64,
        max_text_tokens=24,
    )
    return with_spec(request, sampling=sampling, first_pass=first_pass, **changes)


def with_spec(request: EngineRequest, **changes: object) -> EngineRequest:
    """The request with other values in fields of its spec."""
    return msgspec.structs.replace(request, spec=msgspec.structs.replace(request.spec, **changes))


@dataclass
class FakePages:
    """Page arena and disk: records what was written where, so that a wrong read is detected."""

    num_blocks: int = 0
    written: dict[int, tuple[int, str, set[int]]] = field(default_factory=dict)  # offset -> (end, key, blocks there)
    files: set[str] = field(default_factory=set)
    copies: list[PageCopy] = field(default_factory=list)  # begun and not done

    def write(self, ref: EntryRef, blocks: range) -> None:
        assert ref.host is not None
        start, end = ref.host.offset, ref.host.offset + ref.nbytes
        held = self.written.get(start)
        if held is None or held[:2] != (end, ref.key):
            assert blocks.start == 0, f"block {blocks.start} of {ref.key} comes before its first"
            for other, (other_end, _, _) in list(self.written.items()):
                if other < end and start < other_end:
                    del self.written[other]
            self.written[start] = (end, ref.key, set())
        self.written[start][2].update(blocks)

    def read(self, ref: EntryRef, num_blocks: int) -> None:
        assert ref.host is not None
        end, key, blocks = self.written[ref.host.offset]
        assert (end, key) == (ref.host.offset + ref.nbytes, ref.key), "another entry lies here"
        assert blocks >= set(range(num_blocks)), f"{ref.key} is not full"

    def is_loading(self, ref: EntryRef) -> bool:
        return any(copy.key == ref.key and copy.target == "host" for copy in self.copies)

    def is_lost(self, ref: EntryRef) -> bool:
        """Whether a load in flight will fail."""
        return self.is_loading(ref) and ref.key not in self.files

    def finish_copy(self, index: int) -> PageCopied:
        """End a copy, successfully if its source exists."""
        copy = self.copies.pop(index)
        ok = copy.target == "disk" or copy.key in self.files
        if ok and copy.target == "disk":
            assert copy.host is not None
            self.read(EntryRef(copy.key, copy.nbytes, copy.host), 1)
            self.files.add(copy.key)
        elif ok:
            self.write(EntryRef(copy.key, copy.nbytes, copy.host), range(copy.nbytes // copy.block_bytes))
        return PageCopied(0, copy.key, copy.nbytes, copy.source, copy.target, ok, 0.001)


@dataclass
class FakeWorkers:
    """Workers of one engine: run plans in order on each rank, and check for mistakes that would break a real worker."""

    num_ranks: int = 1
    fail: set[str] = field(default_factory=set)  # request ids whose next item fails
    queues: list[deque[StepPlan]] = field(default_factory=list)
    stored: list[set[TensorKey]] = field(default_factory=list)  # per rank: the values that it has
    failed: set[str] = field(default_factory=set)  # request ids with an item that failed for good
    moved: dict[int, TensorKey] = field(default_factory=dict)  # offset in the value arena -> the value written there
    next_step: dict[str, int] = field(default_factory=dict)  # request id -> step it must do next
    freed: set[str] = field(default_factory=set)
    pages: FakePages = field(default_factory=FakePages)
    primed: list[tuple[float, int, int]] = field(default_factory=list)  # noise level, first block, block after the last
    encoded_templates: int = 0
    full_blocks: int = 0  # most in any step
    denoised: dict[str, list[int]] = field(default_factory=dict)  # request id -> its steps, as they were done

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_ranks)]
        self.stored = [set() for _ in range(self.num_ranks)]

    def submit(self, plan: StepPlan) -> None:
        for rank in range(self.num_ranks):
            self.queues[rank].append(plan)

    def run_one(self, rank: int) -> list[BatchResult | TransferDone]:
        """Run the oldest plan of a rank, if it has one."""
        if not self.queues[rank]:
            return []
        plan = self.queues[rank].popleft()
        for key in plan.free:
            self._free(key, rank)
        if rank == 0:
            self.pages.copies += plan.copies
            self.pages.files -= {key for key in self.pages.files for gone in plan.delete if key.startswith(gone)}
        results: list[BatchResult | TransferDone] = [
            self._run_batch(batch, rank) for batch in plan.batches if rank in batch.ranks
        ]
        results += [self._run_transfer(transfer) for transfer in plan.transfers if transfer.source == rank]
        return results

    def _run_transfer(self, transfer: Transfer) -> TransferDone:
        assert transfer.ref.key in self.stored[transfer.source], "a value is moved from a rank that has none"
        assert transfer.ref.handle is not None
        self.moved[transfer.ref.handle.offset] = transfer.ref.key
        return TransferDone(rank=transfer.source, ref=transfer.ref)

    def _free(self, key: TensorKey, rank: int) -> None:
        if key.node:
            self.stored[rank].discard(key)
        else:
            self.freed.add(key.request_id)
            self.stored[rank] -= {kept for kept in self.stored[rank] if kept.request_id == key.request_id}

    def _has(self, ref: TensorRef, rank: int) -> bool:
        """Whether an input is where its reference says. It may be missing only if an earlier item of its request has
        failed, behind which this one had been sent.
        """
        if ref.rank == rank:
            assert ref.key in self.stored[rank] or ref.key.request_id in self.failed, f"{rank} does not have {ref.key}"
            return ref.key in self.stored[rank]
        assert ref.handle is not None, "a tensor of another rank"
        assert self.moved[ref.handle.offset] == ref.key, "another value lies there"
        return True

    def _make(self, item: Item, op: str, rank: int) -> tuple[TensorRef, ...]:
        """The values that the op makes."""
        names = OPS[op].outputs
        if isinstance(item.work, Denoise) and not item.work.keep_clean:
            names = tuple(name for name in names if name != "clean")
        keys = [TensorKey(item.request_id, item.node, name, item.version) for name in names]
        self.stored[rank] |= set(keys)
        return tuple(TensorRef(key, rank, (16,), "float32", 64) for key in keys)

    def _run_batch(self, batch: Batch, rank: int) -> BatchResult:
        items: list[ItemResult] = []
        lost = Failure("pages_lost", "gone") if any(self._waits_in_vain(item) for item in batch.items) else None
        for item in batch.items:
            assert item.request_id not in self.freed, "work for a request whose tensors are gone"
            is_lost = not all(self._has(ref, rank) for ref in item.inputs)
            if isinstance(item.work, Denoise):
                assert item.work.step == self.next_step.get(item.request_id, 0), "steps out of order"
                self.next_step[item.request_id] = item.work.step + (lost is None)
                self.full_blocks = max(self.full_blocks, len(item.work.full_blocks))
                self.denoised.setdefault(item.request_id, []).append(item.work.step)
            failure = Failure("engine", "told to") if item.request_id in self.fail or is_lost else lost
            self.failed |= {item.request_id} if failure and failure.kind == "engine" else set()
            sigmas = self._touch_pages(item) if failure is None else ()
            made = self._make(item, batch.op, rank) if failure is None else ()
            items.append(ItemResult(item.request_id, item.node, made, 3, sigmas=sigmas, failure=failure))
        return BatchResult(batch_id=batch.id, rank=rank, started=1.0, seconds=0.01 * len(items), items=tuple(items))

    def _touch_pages(self, item: Item) -> tuple[float, ...]:
        """Read and write the cache as a worker would; returns the noise levels of an image encoding."""
        match item.work:
            case ImageEncode() as work:
                self.next_step[item.request_id] = 0
                steps = work.num_inference_steps
                return tuple(1 - i / steps for i in range(steps - work.num_denoising_steps, steps + 1))
            case TemplateEncode() as work:
                self.pages.write(work.out, range(1))
                self.encoded_templates += 1
            case Prime() as work:
                self.pages.read(work.latents, 1)
                self.pages.write(work.out, range(*work.blocks))
                self.primed.append((work.sigma, *work.blocks))
            case Denoise(pages=span) if span is not None:
                for entry in (span.near, span.far):
                    if entry is not None and not self.pages.is_loading(entry):
                        self.pages.read(entry, self.pages.num_blocks)
            case Decode(template_latents=latents) if latents is not None:
                self.pages.read(latents, 1)
        return ()

    def _waits_in_vain(self, item: Item) -> bool:
        """Whether a step reads pages whose load will fail."""
        match item.work:
            case Denoise(pages=span) if span is not None:
                return any(entry is not None and self.pages.is_lost(entry) for entry in (span.near, span.far))
        return False
