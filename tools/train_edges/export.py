"""Stage `export`: writes the averaged weights as a FluxControlNetModel checkpoint in bfloat16."""

from pathlib import Path

import torch
from diffusers import FluxControlNetModel

from tools.train_edges.models import build_controlnet, embedded_transformer
from tools.train_edges.trainer import CHECKPOINT
from tools.train_embedded.training import load, load_state

LARGEST_FOLDER = 3_000_000  # bytes


def averaged(work: Path) -> FluxControlNetModel:
    """The averaged weights of the last training checkpoint. Raises FileNotFoundError if there is none."""
    state = load(work / CHECKPOINT)
    if state is None:
        raise FileNotFoundError(work / CHECKPOINT)
    net = build_controlnet(embedded_transformer())
    load_state(net, state["average"]["controlnet"])
    return net.eval()


def export(work: Path, folder: Path) -> None:
    averaged(work).to(torch.bfloat16).save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(f"the checkpoint has {size} bytes, more than {LARGEST_FOLDER}")
    print(f"exported to {folder}, {size / 1e6:.2f} MB", flush=True)
