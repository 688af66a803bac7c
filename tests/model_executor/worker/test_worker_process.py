"""A real worker process, driven as the engine drives it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from edits import Edit
from forked_processes import ForkedLauncher, fork

from core.config import CacheConfig, EngineConfig, ModelConfig
from core.errors import ConfigError
from core.handles import PAGE_ARENA, VALUE_ARENA, ArrayRef, EntryRef, ModelKey, TensorKey, TensorRef
from core.ipc import local_sockets
from core.ipc.process import ChildProcess, SpawnedProcess
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import (
    Batch,
    BatchResult,
    FromWorker,
    Item,
    Load,
    ModelFailed,
    ModelLoaded,
    PageCopied,
    PageCopy,
    StepPlan,
    Transfer,
    TransferDone,
    WorkerFailed,
    WorkerReady,
)
from core.scheduling.ops.template_encode import TemplateEncode
from engine.client.processes import worker_launcher as worker_launchers
from engine.client.processes.worker_launcher import WorkerLauncher, worker_launcher
from model_executor import executor as executors
from model_executor.executor import Executor

PATIENCE = 60.0
"""Seconds until a worker counts as hung."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder for all workers in this file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "stencil"


@asynccontextmanager
async def workers(
    checkpoint: Path, arena: Arena, number: int, cache: CacheConfig, pages: Arena, keeper: str = ""
) -> AsyncIterator[Executor]:
    """An executor whose workers are ready; a launcher forks them, as in a server."""
    config = EngineConfig(
        models=(
            ModelConfig(model=str(checkpoint), served_model_name="tiny", dtype="float32", device="cpu", threads=1),
        ),
        workers_per_engine=number,
        cache=cache,
        keeper=keeper,
    )
    with closing(Arena.create(VALUE_ARENA, 1 << 20)) as values, worker_launcher.used() as launcher:
        config = msgspec.structs.replace(config, launcher=launcher)
        async with Executor(config, arena.handle, pages.handle, values.handle) as executor:
            models = await asyncio.wait_for(executor.ready(), PATIENCE)
            assert set(models) == {"tiny"}
            assert models["tiny"].page_scheme is not None
            yield executor


async def answers(executor: Executor, plan: StepPlan, number: int) -> list[BatchResult | TransferDone | PageCopied]:
    """Submit `plan` and receive this many messages; fails if the worker dies or an item fails. What the plan frees is
    freed after it.
    """
    executor.submit(msgspec.structs.replace(plan, free=()))
    messages = executor.results()
    taken = []
    for _ in range(number):
        message = await asyncio.wait_for(anext(messages), PATIENCE)
        assert isinstance(message, BatchResult | TransferDone | PageCopied), message
        if isinstance(message, BatchResult):
            assert [item.failure for item in message.items if item.failure] == []
        taken.append(message)
    executor.submit(StepPlan(seq=plan.seq + 1, free=plan.free))
    return taken


async def run(executor: Executor, edit: Edit) -> np.ndarray:
    """All stages of one edit, one plan each."""
    plans = [edit.encode_plan(), *(edit.denoise_plan(step) for step in range(edit.steps)), edit.decode_plan()]
    for plan in plans:
        await answers(executor, plan, len(plan.batches))
    return edit.result()


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 24)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def space(arena: Arena) -> ArenaAllocator:
    return ArenaAllocator(arena)


@pytest.fixture(scope="module")
def pages() -> Iterator[Arena]:
    with closing(Arena.create(PAGE_ARENA, 1 << 20)) as pages:
        yield pages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(tiny_checkpoint: Path, arena: Arena, pages: Arena) -> AsyncIterator[Executor]:
    """Two workers with a disk tier."""
    async with workers(tiny_checkpoint, arena, 2, CacheConfig(disk_bytes=1 << 20), pages) as executor:
        yield executor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lone(tiny_checkpoint: Path, arena: Arena, pages: Arena) -> AsyncIterator[Executor]:
    """One worker without a disk tier."""
    async with workers(tiny_checkpoint, arena, 1, CacheConfig(disk_bytes=0), pages) as executor:
        yield executor


async def test_edits_survive_each_other(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    """Two edits, step by step in one worker, give the bytes that they give alone."""
    alone = [await run(executor, Edit(arena, space, f"alone-{seed}", seed=seed)) for seed in (1, 2)]
    first, second = (Edit(arena, space, f"shared-{seed}", seed=seed) for seed in (1, 2))
    for plan in (first.encode_plan(), second.encode_plan()):
        await answers(executor, plan, 2)
    for step in range(first.steps):
        batch = Edit.denoise_batch([first, second], {first: step, second: step})
        await answers(executor, StepPlan(seq=step, batches=(batch,)), 1)
    await answers(executor, first.decode_plan(), 1)
    await answers(executor, second.decode_plan(), 1)
    assert np.array_equal(first.result(), alone[0])
    assert np.array_equal(second.result(), alone[1])
    assert not np.array_equal(alone[0], alone[1])


async def test_decode_on_another_worker_gives_the_same_bytes(
    executor: Executor, arena: Arena, space: ArenaAllocator
) -> None:
    here = await run(executor, Edit(arena, space, "here", seed=3))
    there = Edit(arena, space, "there", seed=3)
    for plan in (there.encode_plan(), *map(there.denoise_plan, range(there.steps))):
        results = await answers(executor, plan, len(plan.batches))
    assert isinstance(results[0], BatchResult)
    made = {ref.key: ref for ref in results[0].items[0].tensors}[there.state_key("latents", there.steps)]
    source = msgspec.structs.replace(made, handle=ArrayRef(VALUE_ARENA, 64, (made.nbytes,), "uint8"))
    (done,) = await answers(executor, StepPlan(seq=0, transfers=(Transfer(source, 0),)), 1)
    assert isinstance(done, TransferDone)
    await answers(executor, there.decode_plan(rank=1, latents=done.ref), 1)
    assert np.array_equal(there.result(), here)


async def test_a_value_is_written_before_the_batches_of_its_plan(
    executor: Executor, arena: Arena, space: ArenaAllocator
) -> None:
    """So a checkpoint is complete before the step that is sent with it, even if that kills the worker."""
    edit = Edit(arena, space, "checkpoint", seed=3)
    for plan in (edit.encode_plan(), edit.denoise_plan(0)):
        results = await answers(executor, plan, len(plan.batches))
    assert isinstance(results[0], BatchResult)
    made = {ref.key: ref for ref in results[0].items[0].tensors}[edit.state_key("latents", 1)]
    there = msgspec.structs.replace(made, handle=ArrayRef(VALUE_ARENA, 0, (made.nbytes,), "uint8"))
    both = msgspec.structs.replace(edit.denoise_plan(1), transfers=(Transfer(there, 0),))
    assert [type(answer) for answer in await answers(executor, both, 2)] == [TransferDone, BatchResult]


async def test_failed_item_is_a_message(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    """Impossible work fails its item with a cause, also after a free; the worker continues."""
    edit = Edit(arena, space, "stray", seed=1)
    for _ in range(2):
        executor.submit(edit.denoise_plan(0))
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, BatchResult)
        failure = message.items[0].failure
        assert failure is not None
        assert failure.kind == "engine"
        assert "holds no tensor text_encode.prompt_embeds version 0 of stray" in failure.message
        await run(executor, edit)


@pytest.mark.parametrize("damage", ["no message", "an item of a plan"])
async def test_a_worker_that_cannot_read_a_message_ends_and_is_restarted(
    lone: Executor, arena: Arena, space: ArenaAllocator, damage: str
) -> None:
    edit = Edit(arena, space, "sound", seed=5)
    expected = await run(lone, edit)
    payload = b"nonsense"
    if damage != "no message":
        members = msgspec.msgpack.decode(msgspec.msgpack.encode(edit.denoise_plan(0)))
        members["batches"][0]["items"][0]["work"]["step"] = 0.0
        payload = msgspec.msgpack.encode(members)
    lone._workers[0]._channel.send(payload)
    message = await asyncio.wait_for(anext(lone.results()), PATIENCE)
    assert isinstance(message, WorkerFailed)
    assert "a message cannot be decoded" in message.failure.message
    lone.restart(0, 0.0)
    assert isinstance(await asyncio.wait_for(anext(lone.results()), PATIENCE), WorkerReady)
    assert np.array_equal(await run(lone, edit), expected)


async def test_a_worker_whose_message_cannot_be_read_is_killed(
    tiny_checkpoint: Path, arena: Arena, space: ArenaAllocator, pages: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine here knows no results, so that a sound one is damaged to it."""
    monkeypatch.setattr(executors, "FromWorker", WorkerReady | WorkerFailed)
    async with workers(tiny_checkpoint, arena, 1, CacheConfig(disk_bytes=0), pages) as executor:
        executor.submit(Edit(arena, space, "unheard", seed=5).encode_plan())
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, WorkerFailed)
        assert "a message cannot be decoded" in message.failure.message
        assert executor._workers[0]._process.returncode is not None


async def test_a_worker_whose_plan_cannot_be_encoded_is_killed(
    lone: Executor, arena: Arena, space: ArenaAllocator
) -> None:
    """Its requests are judged as after any death; nothing else of the engine ends."""
    edit = Edit(arena, space, "unsendable", seed=6)
    expected = await run(lone, Edit(arena, space, "before", seed=6))
    batch = Edit.denoise_batch([edit], {edit: 0})
    work = msgspec.structs.replace(batch.items[0].work, guidance_scale=np.float64(30))
    item = msgspec.structs.replace(batch.items[0], work=work)
    lone.submit(StepPlan(seq=1, batches=(msgspec.structs.replace(batch, items=(item,)),)))
    assert isinstance(await asyncio.wait_for(anext(lone.results()), PATIENCE), WorkerFailed)
    lone.restart(0, 0.0)
    assert isinstance(await asyncio.wait_for(anext(lone.results()), PATIENCE), WorkerReady)
    assert np.array_equal(await run(lone, edit), expected)


def component(executor: Executor, kind: str) -> ModelKey:
    (key,) = (loaded.key for loaded in executor.components[0] if loaded.key.component == kind)
    return key


async def reload(executor: Executor, key: ModelKey, keeper: ChildProcess | None = None) -> list[FromWorker]:
    """Drop and load a component on all ranks; their answers. keeper: to wait until it has freed what all have dropped,
    so that it loads it again."""
    ranks = tuple(executor.components)
    kept = num_kept(keeper)
    executor.submit(StepPlan(seq=0, loads=(Load(ranks, (), (key,)),)))
    while keeper is not None and num_kept(keeper) == kept:
        await asyncio.sleep(0.01)
    executor.submit(StepPlan(seq=1, loads=(Load(ranks, (key,)),)))
    return [await asyncio.wait_for(anext(executor.results()), PATIENCE) for _ in ranks]


def make_blank(weights: Path) -> None:
    """Set all weights in a file to 0; its time of change stays, so that it counts as the same."""
    content, before = weights.read_bytes(), weights.stat()
    start = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:start] + bytes(len(content) - start))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


async def restarted(executor: Executor, rank: int) -> FromWorker:
    """Kill a worker and start another one; what that says first."""
    executor.kill(rank)
    assert isinstance(await asyncio.wait_for(anext(executor.results()), PATIENCE), WorkerFailed)
    executor.restart(rank, 0.0)
    return await asyncio.wait_for(anext(executor.results()), PATIENCE)


def num_kept(keeper: ChildProcess | None) -> int:
    """Components that a keeper holds."""
    folder = Path(f"/proc/{keeper.pid}/fd") if keeper else Path("/nowhere")
    return sum("memfd:stencil-weights" in str(link.readlink()) for link in folder.glob("*") if link.is_symlink())


async def test_components_are_loaded_and_unloaded(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    edit = Edit(arena, space, "reloaded", seed=1)
    before = await run(executor, edit)
    for message in await reload(executor, component(executor, "vae")):
        assert isinstance(message, ModelLoaded)
        assert message.loaded in executor.components[message.rank]
    assert np.array_equal(await run(executor, edit), before)


async def test_a_component_that_no_model_has_cannot_be_loaded(executor: Executor) -> None:
    executor.submit(StepPlan(seq=0, loads=(Load(tuple(executor.components), (ModelKey("0f", "unheard of"),)),)))
    for _ in executor.components:
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, ModelFailed)
        assert "unheard of" in message.failure.message


async def test_components_are_taken_from_the_keeper_beside_batches(
    launcher: str,
    tiny_checkpoint: Path,
    executor: Executor,
    arena: Arena,
    space: ArenaAllocator,
    pages: Arena,
    tmp_path: Path,
) -> None:
    """Two ranks, with the same picture as by weights that they loaded themselves. One that is restarted reads no file.
    What is damaged fails alone."""
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    edit = Edit(arena, space, "taken", seed=1)
    before = await run(executor, edit)
    with local_sockets.listen() as listener:
        keeper = fork(
            launcher, "model_executor.weights.process:main", b"", [os.dup(listener.fileno())], "stencil-weights"
        )
        async with workers(copy, arena, 2, CacheConfig(), pages, local_sockets.address_of(listener)) as taking:
            for kind in ("vae", "transformer"):
                told = await reload(taking, component(taking, kind))
                assert {message.rank for message in told if isinstance(message, ModelLoaded)} == {0, 1}, told
            assert num_kept(keeper) == 4, "packed weights are shared, too"
            assert np.array_equal(await run(taking, edit), before)
            (weights,) = (copy / "vae").glob("*.safetensors")
            make_blank(weights)
            assert isinstance(await restarted(taking, 0), WorkerReady)
            assert np.array_equal(await run(taking, edit), before)
            (weights,) = (copy / "text_encoder_2").glob("*.safetensors")
            weights.write_bytes(weights.read_bytes()[:1000])
            damaged = taking.components[0][1].key
            for failed in await reload(taking, damaged, keeper):
                assert isinstance(failed, ModelFailed)
                assert failed.failure.kind == "config"
                assert "cut short" in failed.failure.message
        keeper.kill()
        await keeper.wait()


def latents_plan(edit: Edit, out: EntryRef) -> StepPlan:
    """The clean latents of an edit's template, written to `out`."""
    work = TemplateEncode(template=edit.template, width=edit.size[0], height=edit.size[1], out=out)
    item = Item(edit.request_id, "encode_template", "tiny", work, ())
    return StepPlan(seq=0, batches=(Batch(id=1, op="template_encode", ranks=(0,), items=(item,)),))


async def copied(executor: Executor, copy: PageCopy, *, delete: tuple[str, ...] = ()) -> bool:
    """Whether a copy succeeded; exactly one worker does it."""
    (done,) = await answers(executor, StepPlan(seq=0, copies=(copy,), delete=delete), 1)
    assert isinstance(done, PageCopied)
    assert (done.rank, done.key, done.source, done.target) == (0, copy.key, copy.source, copy.target)
    await asyncio.sleep(0.05)
    assert executor._mailbox.empty()
    return done.ok


async def test_pages_go_to_disk_and_come_back_in_the_next_workers(
    tiny_checkpoint: Path, executor: Executor, arena: Arena, space: ArenaAllocator, pages: Arena, cache_folder: Path
) -> None:
    """Without a configured directory, the disk tier is in the user's cache folder."""
    edit = Edit(arena, space, "pages", seed=4)
    nbytes = edit.size[0] // 16 * edit.size[1] // 16 * 64 * 4  # float32; 64 values for 16 x 16 px
    entry = EntryRef("latents", nbytes, ArenaAllocator(pages).alloc(nbytes))
    assert entry.host is not None
    host = pages.view(entry.host)
    up, down = (
        PageCopy("latents", nbytes, nbytes, *tiers, entry.host) for tiers in (("disk", "host"), ("host", "disk"))
    )
    await answers(executor, latents_plan(edit, entry), 1)
    latents = host.copy()
    assert np.abs(latents.view(np.float32)).max() > 0
    assert await copied(executor, down)
    assert len(list((cache_folder / "pages").glob("*.page"))) == 1
    host[:] = 0
    async with workers(tiny_checkpoint, arena, 1, CacheConfig(disk_bytes=1 << 20), pages) as others:
        assert await copied(others, up)
        assert np.array_equal(host, latents)
        assert not await copied(others, up, delete=("latents",))


async def test_worker_that_cannot_start_says_why(tmp_path: Path, arena: Arena, pages: Arena) -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        async with workers(tmp_path / "missing", arena, 1, CacheConfig(), pages):
            pass


async def test_a_start_that_fails_leaves_no_descriptor_open(
    arena: Arena, pages: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: a dead worker's start is tried again and again."""

    def refuse(*_: object) -> ChildProcess:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(executors, "spawn", refuse)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = EngineConfig(models=(ModelConfig(model="any"),), workers_per_engine=4)
    causes = set[int | None]()
    for spare in (0, 4, 5, 6, 8, 50):  # more that the process may open
        before = open_descriptors()
        executor = Executor(config, arena.handle, pages.handle, pages.handle)
        free = sorted(set(range(1000)) - open_descriptors())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limit[1]))
            with pytest.raises(ExceptionGroup) as errors:
                await executor.__aenter__()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        (error,) = errors.value.exceptions
        assert isinstance(error, OSError)
        causes.add(error.errno)
        assert open_descriptors() == before, f"with {spare} more"
    assert causes == {errno.EMFILE, errno.EAGAIN}


def open_descriptors() -> set[int]:
    names = os.listdir("/proc/self/fd")
    return {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}


async def test_without_a_disk_tier_there_are_no_files(lone: Executor, pages: Arena, cache_folder: Path) -> None:
    before = set((cache_folder / "pages").glob("*"))
    ref = ArenaAllocator(pages).alloc(64)
    assert not await copied(lone, PageCopy("a", 64, 64, "host", "disk", ref))
    assert set((cache_folder / "pages").glob("*")) == before


async def test_sigterm_is_left_to_the_parent(lone: Executor, arena: Arena, space: ArenaAllocator) -> None:
    """A supervisor signals the whole process group, but running edits should finish."""
    lone._workers[0]._process.terminate()
    await run(lone, Edit(arena, space, "draining", seed=1))


# --------------------------------------------------------------------------------------- last: they end shared workers


async def next_of(executor: Executor) -> FromWorker:
    return await asyncio.wait_for(anext(executor.results()), PATIENCE)


async def test_a_killed_worker_is_reported_and_another_takes_its_place(
    lone: Executor, arena: Arena, space: ArenaAllocator
) -> None:
    expected = await run(lone, Edit(arena, space, "before", seed=1))
    num_fds = len(os.listdir("/proc/self/fd"))
    lone.kill(0)
    failed = await next_of(lone)
    assert isinstance(failed, WorkerFailed)
    assert failed.failure.kind == "engine_dead"
    lone.restart(0, 0.0)
    lone.submit(StepPlan(seq=7))  # as long as it loads, it gets nothing
    ready = await next_of(lone)
    assert isinstance(ready, WorkerReady)
    assert (ready.rank, ready.components, ready.samples) == (0, lone.components[0], ())
    assert np.array_equal(await run(lone, Edit(arena, space, "after", seed=1)), expected)
    assert len(os.listdir("/proc/self/fd")) <= num_fds  # one less while nobody has asked for its worker's


async def test_without_an_answer_of_the_launcher_workers_are_spawned(
    launcher: str, tiny_checkpoint: Path, arena: Arena, pages: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_launchers, "spawn", partial(ForkedLauncher, launcher))
    own = WorkerLauncher()
    monkeypatch.setattr(sys.modules[__name__], "worker_launcher", own)
    monkeypatch.setattr(executors, "LAST_WORDS_SECONDS", 0.1)
    async with workers(tiny_checkpoint, arena, 1, CacheConfig(), pages) as executor:
        assert own._process is not None
        os.kill(own._process.pid, signal.SIGSTOP)
        executor.kill(0)
        assert isinstance(await next_of(executor), WorkerFailed)
        patient, executor._start_seconds = executor._start_seconds, 0.5
        executor.restart(0, 0.0)
        failed = await next_of(executor)
        assert isinstance(failed, WorkerFailed)
        assert "never forked" in failed.failure.message
        executor._start_seconds = patient
        executor.restart(0, 0.0)
        assert isinstance(await next_of(executor), WorkerReady)
        assert isinstance(executor._workers[0]._process, SpawnedProcess)


async def test_a_worker_that_does_not_come_up_is_killed_and_reported(
    lone: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.kill(0)
    assert isinstance(await next_of(lone), WorkerFailed)
    lone._start_seconds = 1.0
    monkeypatch.setattr(executors, "WORKER_MAIN", "test_worker_process:stuck")
    lone.restart(0, 0.2)
    failed = await next_of(lone)
    assert isinstance(failed, WorkerFailed)
    assert "SIGKILL" in failed.failure.message


def stuck(config: bytes, fds: list[int]) -> None:
    """The entry point of a worker that hangs while it loads."""
    time.sleep(1000)


async def test_the_workers_end_while_one_is_restarted(
    tiny_checkpoint: Path, arena: Arena, pages: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(tiny_checkpoint, arena, 1, CacheConfig(), pages) as executor:
        monkeypatch.setattr(executors, "WORKER_MAIN", "test_worker_process:stuck")
        executor.kill(0)
        assert isinstance(await next_of(executor), WorkerFailed)
        executor.restart(0, 0.0)
        await asyncio.sleep(0.1)
        process = executor._workers[0]._process
    assert process.returncode is not None


async def test_plan_that_cannot_be_done_ends_the_worker_with_its_cause(executor: Executor) -> None:
    """An order that no engine should give is not a request's fault: the worker reports it and exits."""
    missing = TensorRef(
        TensorKey("unheard of", "denoise", "latents"), 0, handle=ArrayRef(VALUE_ARENA, 64, (8,), "uint8")
    )
    executor.submit(StepPlan(seq=0, transfers=(Transfer(missing, 0),)))
    message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
    assert isinstance(message, WorkerFailed)
    assert "unheard of" in message.failure.message
