"""The memory that control groups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.ipc.limits import cgroup_limits, memory_limit


def test_the_limits_of_all_groups_from_its_own_to_the_root_count(tmp_path: Path) -> None:
    own = tmp_path / "user.slice/server.service"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text("3000\n")
    (tmp_path / "memory.max").write_text("4000\n")
    assert list(cgroup_limits("0::/user.slice/server.service\n", tmp_path)) == [3000, 4000]


def test_version_1_has_its_groups_in_a_folder_of_the_controller(tmp_path: Path) -> None:
    own = tmp_path / "memory/docker/some"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9000\n")
    membership = "9:name=systemd:/\n4:memory:/docker/some\n3:cpuset,cpu:/docker/some\n0::/\n"
    assert list(cgroup_limits(membership, tmp_path)) == [2000, 9000]


@pytest.mark.parametrize("path", ["/", "/docker/not-visible-here", "/../../outside"])
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, path: str) -> None:
    (tmp_path / "memory.max").write_text("4000\n")
    assert list(cgroup_limits(f"0::{path}\n", tmp_path)) == [4000]


def test_this_machine_has_memory() -> None:
    assert memory_limit() > 2**20
