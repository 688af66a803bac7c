"""Stage `export`: writes the averaged weights as a CLIPSeg checkpoint, in half precision."""

import json
from pathlib import Path

import torch
from transformers import CLIPSegForImageSegmentation

from tools.train_embedded.training import load, load_state
from tools.train_segmenter.models import build_model, image_processor, tokenizer_in
from tools.train_segmenter.trainer import CHECKPOINT, TOKENIZER

LARGEST_FOLDER = 3_000_000  # bytes
THINGS = (
    "hat", "hair", "shoes", "shirt", "coat", "dress", "sweater", "trousers", "skirt", "shorts", "person", "background",
)  # fmt: skip
"""What a point or a box may mean: of what is there, the first one."""

PROCESSOR = "ViTImageProcessor"  # every release's name for it, with or without torchvision


def averaged(work: Path) -> CLIPSegForImageSegmentation:
    """The averaged weights of the last training checkpoint. Raises FileNotFoundError if there is none."""
    state = load(work / CHECKPOINT)
    if state is None:
        raise FileNotFoundError(work / CHECKPOINT)
    model = build_model(tokenizer_in(work / TOKENIZER), state["sizes"])
    load_state(model, state["average"]["segmenter"])
    return model.eval()


def export(work: Path, folder: Path) -> None:
    model = averaged(work)
    model.to(torch.float16).save_pretrained(folder)
    tokenizer_in(work / TOKENIZER).save_pretrained(folder)
    image_processor().save_pretrained(folder)
    (folder / "things.json").write_text(json.dumps(THINGS) + "\n")
    # Half precision is for the disk: CPUs compute in float32, which `from_pretrained` then converts the weights to.
    _change(folder / "config.json", dtype="float32")
    _change(folder / "preprocessor_config.json", image_processor_type=PROCESSOR)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(f"the checkpoint has {size} bytes, more than {LARGEST_FOLDER}")
    print(f"exported to {folder}, {size / 1e6:.2f} MB", flush=True)


def _change(path: Path, **values: str) -> None:
    """Replace values of a JSON file, those of nested objects too."""

    def changed(node: object) -> object:
        if not isinstance(node, dict):
            return node
        return {key: values.get(key, changed(value)) for key, value in node.items()}

    path.write_text(json.dumps(changed(json.loads(path.read_text())), indent=2) + "\n")
