"""ModelScheduler: which samplers and schedules of ComfyUI a served model's scheduler does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import ModelConfig
from entrypoints.workflows.comfy.sampler_names import why_not


@dataclass(frozen=True, slots=True)
class ModelScheduler:
    """A model's, as its scheduler_config.json was when it was read."""

    model: str
    config: Mapping[str, Any] | None  # None: it is not in a directory here, or cannot be read, as loading says

    @classmethod
    def read(cls, model: ModelConfig) -> ModelScheduler:
        """Reads a file, whose disk may hang: only when a server starts."""
        try:
            read = json.loads((Path(model.model) / "scheduler" / "scheduler_config.json").read_text())
        except (OSError, ValueError):
            read = None
        return cls(model.name, read if isinstance(read, dict) else None)

    def why_not(self, sampler: str, schedule: str) -> str:
        """Why it does not do a sampler with a schedule; "": it does, as far as its file is here."""
        return "" if self.config is None else why_not(self.config, sampler, schedule)
