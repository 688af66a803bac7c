"""Pages on disk: the next start needs no priming, and whatever the tiers hold, the picture is the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pictures import Pixels, photo

from core.config import CacheConfig
from core.request import SamplingParams
from engine.edit import EditReport
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
    """Entries are written in the background."""
    deadline = time.monotonic() + 20
    while len(files := sorted(directory.glob("*.page"))) < number:
        assert time.monotonic() < deadline, f"{len(files)} of {number} files"
        time.sleep(0.01)
    return files


def use_twice(checkpoint: Path, directory: Path) -> Pixels:
    """Edit one picture twice, so that its pages go to disk; what was painted."""
    with engine_of(checkpoint, disk_bytes=ROOMY, directory=str(directory)) as engine:
        painted, report = run(engine, 0)
        assert report.cache == "miss"
        again, _ = run(engine, 0)
        assert np.array_equal(painted, again)
        wait_for_files(directory, 5)  # the clean latents, and 4 of 5 keyframes: no step reads noise level 0
    return painted


def test_a_restart_with_a_warm_disk_primes_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    painted = use_twice(tiny_checkpoint, tmp_path / "pages")
    with engine_of(tiny_checkpoint, disk_bytes=ROOMY, directory=str(tmp_path / "pages")) as engine:
        again, report = run(engine, 0)
        assert (report.cache, report.tier, report.primed) == ("hit", "disk", False)
        assert np.array_equal(painted, again)
        _, other = run(engine, 1)
        assert other.cache == "miss"


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
def test_damaged_files_are_misses(tiny_checkpoint: Path, tmp_path: Path, block_plan: str) -> None:
    painted = use_twice(tiny_checkpoint, tmp_path / "pages")
    for file, damage in zip(sorted((tmp_path / "pages").glob("*.page")), cycle(DAMAGES), strict=False):
        damage(file)
    cache = {"disk_bytes": ROOMY, "directory": str(tmp_path / "pages"), "block_plan": block_plan}
    with engine_of(tiny_checkpoint, **cache) as engine:
        again, report = run(engine, 0)
        assert report.cache == "miss"
        assert np.array_equal(painted, again)


def test_another_templates_pages_are_misses(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Whole files, with right checksums and of the same size, under each other's names."""
    cache = {"disk_bytes": ROOMY, "directory": str(tmp_path / "pages")}
    with engine_of(tiny_checkpoint, **cache) as engine:
        painted = [run(engine, seed)[0] for seed in (0, 1, 0, 1)][:2]
        files = wait_for_files(tmp_path / "pages", 10)
    for file, size in [(file, file.stat().st_size) for file in files[:5]]:
        other = next(other for other in files[5:] if other.stat().st_size == size)
        content = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with engine_of(tiny_checkpoint, **cache) as engine:
        for seed in (0, 1):
            again, report = run(engine, seed)
            assert report.cache == "miss"
            assert np.array_equal(painted[seed], again)


def test_what_the_cache_holds_changes_no_picture(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seeds = [0, 1, 0, 2, 1, 0, 0, 2]
    with engine_of(tiny_checkpoint) as engine:
        expected = {seed: run(engine, seed)[0] for seed in set(seeds)}
        assert engine.model.page_scheme is not None
        one = engine.model.page_scheme.template_bytes(36, 5)
    tight = {"host_bytes": one, "disk_bytes": 2 * one, "directory": str(tmp_path / "pages")}
    others = set(psutil.Process().children(recursive=True))  # engines that other modules of this run keep for later
    with engine_of(tiny_checkpoint, **tight) as engine:
        seen = set()
        for seed in seeds:
            painted, report = run(engine, seed)
            assert np.array_equal(painted, expected[seed])
            seen.add((report.cache, report.tier))
            assert resident_page_bytes(others) <= one
        assert ("hit", "host") in seen
        assert resident_page_bytes(others) > one / 2, "the arena was found"
        assert ("miss", None) in seen
    assert sum(file.stat().st_size for file in (tmp_path / "pages").iterdir()) <= 2 * one


def resident_page_bytes(others: set[psutil.Process]) -> int:
    """Memory of the page arena, as the kernel counts it for the process that has touched most of it, `others` aside."""
    processes = set(psutil.Process().children(recursive=True)) - others
    return max(map(_page_arena_bytes, processes), default=0)


def _page_arena_bytes(process: psutil.Process) -> int:
    maps = process.memory_maps(grouped=True)
    return sum(area.rss for area in maps if area.path.startswith("/memfd:stencil-arena-1"))


def test_a_device_tier_paints_the_same(tiny_checkpoint: Path) -> None:
    with engine_of(tiny_checkpoint) as engine:
        expected = {seed: run(engine, seed)[0] for seed in (0, 1)}
    with engine_of(tiny_checkpoint, device_bytes=ROOMY) as engine:
        for seed in (0, 1, 0, 1):
            painted, report = run(engine, seed)
            assert np.array_equal(painted, expected[seed])
            assert report.tier in (None, "device")


def test_pages_that_come_up_while_blocks_are_computed_in_full(tiny_checkpoint: Path, tmp_path: Path) -> None:
    use_twice(tiny_checkpoint, tmp_path / "pages")
    cache = {"disk_bytes": ROOMY, "directory": str(tmp_path / "pages"), "block_plan": "auto"}
    with engine_of(tiny_checkpoint, **cache) as engine:
        _, report = run(engine, 0)
        assert (report.cache, report.tier) == ("hit", "disk")
        assert 0 <= report.full_blocks <= 3
