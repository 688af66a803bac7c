"""The folder of pages on disk: never in the working directory by accident, and refused if it is not a usable folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from core.cache_folder import page_folder, user_cache_folder
from core.config import CacheConfig, EngineConfig, StencilConfig
from core.errors import ConfigError
from engine.client.async_engine import AsyncEngine
from engine.client.processes.page_folder import check_page_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/stencil"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/caches"}, "/caches/stencil"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": ""}, "/home/me/.cache/stencil"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "caches"}, "/home/me/.cache/stencil"),
        ({"HOME": ""}, "/.cache/stencil"),
        ({"HOME": "here"}, "/.cache/stencil"),
        ({"HOME": "", "XDG_CACHE_HOME": "caches"}, "/.cache/stencil"),
        ({}, "/.cache/stencil"),
    ],
)
def test_caches_never_lie_in_the_working_directory(environment: dict[str, str], folder: str) -> None:
    assert user_cache_folder(environment) == Path(folder)
    assert page_folder("", environment) == Path(folder) / "pages"


def check(directory: Path | str, disk_bytes: int = 1000) -> None:
    check_page_folder(CacheConfig(directory=str(directory), disk_bytes=disk_bytes))


def test_a_folder_that_is_there_or_can_be_made_is_left_as_it_is(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "pages", "a/b/pages"])
@pytest.mark.parametrize("disk_bytes", [0, 1000])
def test_a_file_is_no_folder(tmp_path: Path, below: str, disk_bytes: int) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"{file} is no folder; give another --cache-dir"):
        check(file / below, disk_bytes)


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="is no folder"):
        check(link)
    (tmp_path / "gone").mkdir()
    check(link)


@pytest.mark.parametrize("directory", ["~no-such-user/pages", "/" + "x" * 300])
def test_a_path_that_cannot_be_looked_up_is_an_error(directory: str) -> None:
    with pytest.raises(ConfigError, match="--cache-dir"):
        check(directory)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_folders_without_write_access_are_refused_or_only_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="may not write"):
        check(tmp_path / "pages")
    with caplog.at_level(logging.WARNING, "stencil.engine"):
        check(tmp_path)  # pages may lie there, to be read
    assert "not written" in caplog.text


def test_denied_write_access_is_noticed_also_by_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As above, with a faked os.access, since root may write anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may not write"):
        check(tmp_path / "pages")
    with caplog.at_level(logging.WARNING, "stencil.engine"):
        check(tmp_path)
    assert "not written" in caplog.text


async def test_an_engine_refuses_the_folder_before_it_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    engine = AsyncEngine(StencilConfig(engine=EngineConfig(cache=CacheConfig(directory=str(file)))))
    with pytest.raises(ConfigError, match="is no folder"):
        await engine.start()
