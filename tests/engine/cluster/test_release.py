"""Machines whose code differs are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from engine.cluster import release


def test_another_machine_must_run_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = release.source_digest()
    release.check_same(ours, "10.0.0.2")
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "config.py").write_text("X = 1\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.source_digest.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"10\.0\.0\.2 has another release"):
            release.check_same(ours, "10.0.0.2")
    finally:
        release.source_digest.cache_clear()
