"""Cache tiers: pages on disk save the next start from priming, and the tier never changes the picture."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pictures import Pixels, photo

from core.config import CacheConfig
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditReport
from entrypoints import Edit, ImageEngine

SIDE = 96  # px: 36 tokens
ROOMY = 64 * 1024 * 1024


def edit_of(seed: int) -> Edit:
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[36:60, 20:58] = 255
    return Edit(prompt="a red hat", image=photo(SIDE, SIDE, seed), mask_image=mask)


@contextmanager
def engine_of(checkpoint: Path, **cache: Any) -> Iterator[ImageEngine]:
    settings: dict[str, Any] = {"host_bytes": ROOMY, **cache}
    with ImageEngine(str(checkpoint), dtype="float32", threads=1, cache=CacheConfig(**settings)) as engine:
        yield engine


def run(engine: ImageEngine, seed: int) -> tuple[Pixels, EditReport]:
    (result,) = engine.generate([edit_of(seed)], SamplingParams(num_inference_steps=4, seed=7), use_tqdm=False)
    assert result.error is None, result.error
    return np.asarray(result.images[0]), result.reports[0]


def wait_for_files(directory: Path, number: int) -> list[Path]:
    """Wait for the files of entries, which are written in the background."""
    deadline = time.monotonic() + 20
    while len(files := sorted(directory.glob("*.page"))) < number:
        assert time.monotonic() < deadline, f"{len(files)} of {number} files"
        time.sleep(0.01)
    return files


@dataclass(frozen=True)
class Kept:
    """Results of an engine that has ended: its cold pictures by seed, and the page files of templates 0 and 1."""

    painted: dict[int, Pixels]
    files: dict[int, list[Path]]
    template_bytes: int  # most that a template's pages take

    def copy(self, directory: Path) -> dict[int, list[Path]]:
        """A copy of the files, to change."""
        directory.mkdir()
        return {seed: [Path(shutil.copy(file, directory)) for file in files] for seed, files in self.files.items()}


@pytest.fixture(scope="module")
def kept(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    painted: dict[int, Pixels] = {}
    files: dict[int, list[Path]] = {}
    directory = tmp_path_factory.mktemp("kept") / "pages"
    with engine_of(tiny_checkpoint, disk_bytes=ROOMY, directory=str(directory)) as engine:
        for seed in range(3):
            painted[seed], report = run(engine, seed)
            assert report.cache == "miss"
        for seed in range(2):  # used twice, they go to disk
            again, _ = run(engine, seed)
            assert np.array_equal(painted[seed], again)
            # Clean latents, and 4 of 5 keyframes: no step reads noise level 0.
            written = wait_for_files(directory, 5 * (seed + 1))
            files[seed] = [file for file in written if file not in files.get(0, ())]
        assert engine.model.page_scheme is not None
        return Kept(painted, files, engine.model.page_scheme.template_bytes(36, 5))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace(file: Path) -> None:
    file.write_bytes(b"not a page")


DAMAGES: tuple[Callable[[Path], None], ...] = (truncate, flip_a_bit, replace)


@pytest.mark.parametrize("block_plan", ["off", "auto"])
def test_a_restart_with_a_warm_disk_primes_nothing_and_takes_damaged_files_for_misses(
    tiny_checkpoint: Path, tmp_path: Path, kept: Kept, block_plan: str
) -> None:
    for file, damage in zip(kept.copy(tmp_path / "pages")[1], cycle(DAMAGES), strict=False):
        damage(file)
    cache = {"disk_bytes": ROOMY, "directory": str(tmp_path / "pages"), "block_plan": block_plan}
    with engine_of(tiny_checkpoint, **cache) as engine:
        warm, report = run(engine, 0)
        assert (report.cache, report.tier, report.primed) == ("hit", "disk", False)
        if block_plan == "off":
            assert np.array_equal(warm, kept.painted[0])
        else:
            assert 0 <= report.full_blocks <= 3, "while the others' pages come up"
        for seed in (1, 2):
            cold, report = run(engine, seed)
            assert (report.cache, report.full_blocks) == ("miss", 0), "however late its files' state is noticed"
            assert np.array_equal(cold, kept.painted[seed])


def test_another_templates_pages_are_misses(tiny_checkpoint: Path, tmp_path: Path, kept: Kept) -> None:
    """Valid files of the right size, swapped with each other."""
    files = kept.copy(tmp_path / "pages")
    for file, size in [(file, file.stat().st_size) for file in files[0]]:
        other = next(other for other in files[1] if other.stat().st_size == size)
        content = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with engine_of(tiny_checkpoint, disk_bytes=ROOMY, directory=str(tmp_path / "pages")) as engine:
        for seed in (0, 1):
            again, report = run(engine, seed)
            assert report.cache == "miss"
            assert np.array_equal(kept.painted[seed], again)


def test_the_content_of_the_cache_changes_no_picture(tiny_checkpoint: Path, tmp_path: Path, kept: Kept) -> None:
    one = kept.template_bytes
    tight = {"host_bytes": one, "disk_bytes": 2 * one, "directory": str(tmp_path / "pages")}
    others = set(psutil.Process().children(recursive=True))  # engines that other modules of this run keep for later
    with engine_of(tiny_checkpoint, **tight) as engine:
        seen = set()
        for seed in (0, 1, 0, 2, 1, 0, 0, 2):
            painted, report = run(engine, seed)
            assert np.array_equal(painted, kept.painted[seed])
            seen.add((report.cache, report.tier))
            assert resident_page_bytes(others) <= one
        assert ("hit", "host") in seen
        assert resident_page_bytes(others) > one / 2, "the arena was found"
        assert ("miss", None) in seen
    assert sum(file.stat().st_size for file in (tmp_path / "pages").iterdir()) <= 2 * one


def resident_page_bytes(others: set[psutil.Process]) -> int:
    """Memory of the page arena, as the kernel counts it for the process with most of it, without `others`."""
    processes = set(psutil.Process().children(recursive=True)) - others
    return max(map(_page_arena_bytes, processes), default=0)


def _page_arena_bytes(process: psutil.Process) -> int:
    maps = process.memory_maps(grouped=True)
    return sum(area.rss for area in maps if area.path.startswith("/memfd:stencil-arena-1"))


def test_a_device_tier_paints_the_same(tiny_checkpoint: Path, kept: Kept) -> None:
    with engine_of(tiny_checkpoint, device_bytes=ROOMY) as engine:
        for seed in (0, 1, 0, 1):
            painted, report = run(engine, seed)
            assert np.array_equal(painted, kept.painted[seed])
            assert report.tier in (None, "device")
