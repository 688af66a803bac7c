from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.random_checkpoints import make_flux_fill

torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random FLUX.1 Fill checkpoint with guidance embedding and dynamic shifting, as FLUX.1-Fill-dev has them."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return make_flux_fill(path, guidance_embeds=True, scheduler={"use_dynamic_shifting": True})
