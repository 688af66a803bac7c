"""Scheduler and runner in one process: mask-aware edits, and steps that start while their pages load."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from adapters import make_lora

from core.config import AdapterConfig, CacheConfig, ModelConfig, SchedulerConfig
from core.graph.work import Work
from core.graph.workflows.inpaint import INPAINT
from core.handles import PAGE_ARENA, VALUE_ARENA, ArrayRef, Artefact
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.engine import EngineRequest, Finished
from core.messages.specs import EditSpec
from core.messages.worker import PageCopied, TransferDone
from core.patches import Patch, PatchSet
from core.sampling_params import SamplingParams
from core.scheduling.scheduler import StepScheduler
from core.scheduling.values.values import VALUE_BYTES
from engine.images.image_ops import content_id
from model_executor.page_cache.page_files import PageFiles
from model_executor.page_cache.page_store import PageStore
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.runner import Runner
from model_executor.worker.stores.tensor_store import SharedMemory, TensorStore
from tools.random_checkpoints import make_flux_fill

Pixels = npt.NDArray[np.uint8]

SIDE, TOKEN = 96, 16
NUM_TOKENS = (SIDE // TOKEN) ** 2
ACTIVE = np.array([14, 15, 20, 21], np.int32)
BLOCK_SECONDS = 0.02


class SlowFiles(PageFiles):
    """A disk that is slow to read each block."""

    def read(
        self,
        key: str,
        out: npt.NDArray[np.uint8],
        block_bytes: int,
        on_block: Callable[[int], None],
        order: Sequence[int] = (),
    ) -> bool:
        def slow(block: int) -> None:
            time.sleep(BLOCK_SECONDS)
            on_block(block)

        return super().read(key, out, block_bytes, slow, order)


class Arenas:
    """The two arenas of a worker."""

    def __init__(self, *arenas: Arena) -> None:
        self._arenas = {arena.id: arena for arena in arenas}

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        return self._arenas[ref.arena].view(ref)


class Rig:
    """An engine without processes. files: its disk tier."""

    def __init__(self, models: ResidentModels, cache: CacheConfig, files: PageFiles | None) -> None:
        ready = models.ready(0)
        infos = {info.name: info for info in ready.models}
        self._patches = {name: (Patch(info.patch),) if info.parent else () for name, info in infos.items()}
        self.scheduler = StepScheduler(SchedulerConfig(), infos, cache=cache)
        self.scheduler.learn((), [(0, ready.components)])
        self.copied: queue.SimpleQueue[PageCopied] = queue.SimpleQueue()
        self._arena, pages = Arena.create(0, 2**26), Arena.create(PAGE_ARENA, cache.host_bytes)
        self._space = ArenaAllocator(self._arena)
        self.store = PageStore(models.device, pages, files, self.copied.put)
        memory: SharedMemory = Arenas(self._arena, Arena.create(VALUE_ARENA, VALUE_BYTES))
        self._tensors = TensorStore(0, models.device, memory)
        self._runner = Runner(0, WorkerContext(models.families, self._tensors, memory, self.store))
        self._info = next(iter(infos.values()))

    def edit(self, name: str, template: Pixels, *, mask_aware: bool = True, model: str = "") -> tuple[Pixels, Finished]:
        """Run one edit of the ACTIVE tokens; its pixels. model: or an adapter; "" for the first."""
        request = self._request(name, template, mask_aware, self._patches[model or self._info.name])
        self.scheduler.add(request)
        while True:
            self._iterate()
            for output in self.scheduler.take_outputs():
                assert isinstance(output, Finished), output
                self.scheduler.check_integrity()
                return self._arena.view(request.spec.pixels).copy(), output

    def run_until_idle(self) -> None:
        """Run until all pages have been copied down."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self._iterate()
            try:
                self.scheduler.apply_copy(self.copied.get(timeout=0.3))
            except queue.Empty:
                return

    def _iterate(self) -> None:
        plan = self.scheduler.schedule(time.monotonic())
        for copy in plan.copies if plan else ():
            self.store.start(copy)
        for transfer in plan.transfers if plan else ():
            self.scheduler.apply_transfer(TransferDone(0, self._tensors.export(transfer.ref)))
        for batch in plan.batches if plan else ():
            self.scheduler.apply(self._runner.run(batch))
        while not self.copied.empty():
            self.scheduler.apply_copy(self.copied.get())

    def _request(self, name: str, template: Pixels, mask_aware: bool, patches: PatchSet) -> EngineRequest:
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[34:60, 34:60] = 1
        return EngineRequest(
            request_id=name,
            model=self._info.name,
            arrival=time.monotonic(),
            workflow=INPAINT.name,
            rounds=(4,),
            spec=EditSpec(
                prompt="a red hat",
                patches=patches,
                sampling=SamplingParams(num_inference_steps=4, guidance_scale=30.0, seed=3, full_steps=0),
                width=SIDE,
                height=SIDE,
                template=self._share(template),
                mask=self._share(mask),
                active=self._share(ACTIVE),
                content_id=content_id(template),
                num_tokens=NUM_TOKENS,
                max_text_tokens=self._info.max_text_tokens,
                outputs={"picture": Artefact(self._share(np.zeros_like(template)))},
                is_mask_aware=mask_aware,
            ),
        )

    def _share(self, array: npt.NDArray[np.generic]) -> ArrayRef:
        ref = carve(self._space.alloc(array.nbytes), 0, array.shape, array.dtype.name)
        self._arena.view(ref)[...] = array
        return ref


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ResidentModels:
    path = make_flux_fill(tmp_path_factory.mktemp("model") / "flux")
    resident = ResidentModels.open([ModelConfig(model=str(path), dtype="float32")])
    resident.load_all()
    return resident


@pytest.fixture
def template() -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


@pytest.fixture
def warm_directory(models: ResidentModels, template: Pixels, tmp_path: Path) -> Iterator[tuple[Path, Pixels]]:
    """A disk with the template's pages, and the picture of an edit of it."""
    files = PageFiles(tmp_path / "pages", 2**28)
    rig = Rig(models, CacheConfig(host_bytes=2**26, disk_bytes=2**28), files)
    with closing(rig.store):
        painted, first = rig.edit("a", template)
        assert first.cache == "miss"
        rig.edit("b", template)
        rig.run_until_idle()
        yield tmp_path / "pages", painted


def test_a_warm_edit_equals_the_cold_one_and_paints_only_around_the_mask(
    models: ResidentModels, template: Pixels
) -> None:
    rig = Rig(models, CacheConfig(host_bytes=2**26), None)
    with closing(rig.store):
        cold, first = rig.edit("cold", template)
        warm, second = rig.edit("warm", template)
    assert (first.cache, second.cache) == ("miss", "hit")
    assert np.array_equal(cold, warm)
    assert np.array_equal(warm[:16], template[:16]), "far from the mask it is the template itself"
    assert not np.array_equal(warm[34:60, 34:60], template[34:60, 34:60])


def test_a_step_waits_for_its_blocks_on_a_slow_disk(
    models: ResidentModels, template: Pixels, warm_directory: tuple[Path, Pixels]
) -> None:
    directory, painted = warm_directory
    cache = CacheConfig(host_bytes=2**26, disk_bytes=2**28, block_plan="auto")
    rig = Rig(models, cache, SlowFiles(directory, 2**28))
    teach_costs(rig.scheduler, load=0.002)
    with closing(rig.store):
        again, finished = rig.edit("a", template)
    assert (finished.cache, finished.tier, finished.full_blocks) == ("hit", "disk", 0)
    assert np.array_equal(again, painted), "waiting changes nothing"


def test_leading_blocks_in_full_change_little(
    models: ResidentModels, template: Pixels, warm_directory: tuple[Path, Pixels]
) -> None:
    directory, painted = warm_directory
    cache = CacheConfig(host_bytes=2**26, disk_bytes=2**28, block_plan="auto")
    rig = Rig(models, cache, SlowFiles(directory, 2**28))
    teach_costs(rig.scheduler, load=0.06)
    with closing(rig.store):
        again, finished = rig.edit("a", template)
    assert (finished.cache, finished.tier) == ("hit", "disk")
    assert finished.full_blocks > 0
    assert np.abs(again.astype(int) - painted).mean() < 2, "of 255"


def test_pages_of_other_adapters_are_not_mixed(template: Pixels, tmp_path: Path) -> None:
    """Neither in memory nor on disk; the same adapter under another name shares pages."""
    checkpoint = make_flux_fill(tmp_path / "flux")
    files = {name: make_lora(tmp_path / f"{name}.safetensors", checkpoint, seed=len(name)) for name in ("hat", "shirt")}
    files["again"] = files["hat"]
    adapters = tuple(AdapterConfig(name, str(path)) for name, path in files.items())
    models = ResidentModels.open(
        [ModelConfig(model=str(checkpoint), served_model_name="plain", dtype="float32", adapters=adapters)]
    )
    models.load_all()
    cache, disk = CacheConfig(host_bytes=2**26, disk_bytes=2**28), PageFiles(tmp_path / "pages", 2**28)
    alone = {}
    for name in ("plain", "hat", "shirt"):
        rig = Rig(models, CacheConfig(host_bytes=2**26), None)
        with closing(rig.store):
            alone[name], _ = rig.edit(name, template, model=name)
    assert len({picture.tobytes() for picture in alone.values()}) == 3
    rig = Rig(models, cache, disk)
    with closing(rig.store):
        for expected in ("miss", "hit", "hit"):
            for name, before in alone.items():
                picture, finished = rig.edit(f"{name}-{expected}", template, model=name)
                assert np.array_equal(picture, before)
                assert finished.cache == expected
            rig.run_until_idle()
        picture, finished = rig.edit("again", template, model="again")
        assert np.array_equal(picture, alone["hat"])
        assert finished.cache == "hit"
    rig = Rig(models, cache, PageFiles(tmp_path / "pages", 2**28))
    with closing(rig.store):
        for name, before in alone.items():
            picture, finished = rig.edit(name, template, model=name)
            assert np.array_equal(picture, before)
            assert (finished.cache, finished.tier) == ("hit", "disk")


def teach_costs(scheduler: StepScheduler, *, load: float) -> None:
    """An entry takes `load` seconds to load and minutes to prime; a step takes 4 ms over pages and 12 ms without."""
    (info,) = scheduler.models.values()
    assert info.page_scheme is not None
    nbytes = info.page_scheme.layout.entry_bytes(NUM_TOKENS)
    every, active = NUM_TOKENS + info.max_text_tokens, len(ACTIVE) + info.max_text_tokens
    for _ in range(50):
        scheduler.cost.observe_copy("disk", "host", nbytes, load)
        scheduler.cost.observe(scheduler.cost_key(info.name, "prime"), Work.of([every]), 100.0)
        scheduler.cost.observe(scheduler.cost_key(info.name, "denoise"), Work.of([every]), 0.012)
        scheduler.cost.observe(scheduler.cost_key(info.name, "denoise"), Work.of_pairs([(active, every)]), 0.004)
