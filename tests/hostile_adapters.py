"""Files that a caller may name as an adapter, and that must be refused quickly, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from adapters import make_lora, make_peft_lora
from safetensors.torch import load_file, save_file

LAYER = "transformer.x_embedder"
NESTED = "[" * 5000 + "]" * 5000


def declared(path: Path, shapes: Mapping[str, tuple[int, int]], metadata: Mapping[str, str] | None = None) -> Path:
    """A sparse file whose header declares tensors of float32, none of which is written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def of_rank(path: Path, rank: int, inputs: int = 64, outputs: int = 64) -> Path:
    """A sparse adapter of one layer."""
    return declared(path, {f"{LAYER}.lora_A.weight": (rank, inputs), f"{LAYER}.lora_B.weight": (outputs, rank)})


def hostile_adapters(folder: Path, checkpoint: Path) -> dict[str, tuple[Path, str]]:
    """What is wrong -> (the file or folder, a part of the reason). checkpoint: of a FLUX model, which they are for."""
    folder.mkdir()
    good = make_lora(folder / "good.safetensors", checkpoint, "x_embedder")
    found: dict[str, tuple[Path, str]] = {}

    def changed(name: str, reason: str, change: Any, **metadata: str) -> None:
        path = folder / f"{name}.safetensors"
        tensors = load_file(good)
        change(tensors)
        save_file(tensors, path, metadata or None)
        found[name] = path, reason

    def fill(value: float, half: str = "lora_B") -> Any:
        return lambda tensors: tensors[f"{LAYER}.{half}.weight"].fill_(value)

    def peft(name: str, reason: str, config: str) -> None:
        path = make_peft_lora(folder / name, checkpoint, "x_embedder")
        (path / "adapter_config.json").write_text(config)
        found[name] = path, reason

    def with_config(name: str, reason: str, **members: Any) -> None:
        peft(name, reason, json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4} | members))

    found["rank"] = of_rank(folder / "rank.safetensors", 100_000), "is of rank 100000"
    found["size"] = of_rank(folder / "size.safetensors", 3_000_000_000), "MB of memory"
    found["no rank"] = of_rank(folder / "none.safetensors", 0), "is of rank 0"
    os.mkfifo(folder / "fifo.safetensors")
    found["fifo"] = folder / "fifo.safetensors", "no regular file"
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    found["device"] = folder / "zero.safetensors", "no regular file"
    long = folder / "long.safetensors"
    long.write_bytes(struct.pack("<Q", 99_000_000))
    os.truncate(long, 100_000_000)
    found["long header"] = long, "its header has more than"
    names = {f"{LAYER}.{number}.lora_A.weight": (1, 1) for number in range(40_000)}
    found["many tensors"] = declared(folder / "many.safetensors", names), "at most 32768 are read"
    found["long name"] = declared(folder / "name.safetensors", {"x" * 100_000: (1, 1)}), "more than 512 characters"
    for name, value in {"nan": float("nan"), "infinite": float("inf")}.items():
        changed(name, "not all finite", fill(value))
    changed("nan inside", "not all finite", fill(float("nan"), "lora_A"))
    for name, value in {"nan alpha": float("nan"), "infinite alpha": float("inf")}.items():
        changed(
            name,
            "no finite number",
            lambda tensors, value=value: tensors.update({f"{LAYER}.alpha": torch.tensor(value)}),
        )
    changed(
        "too huge",
        "not all finite",
        lambda tensors: (fill(3e38)(tensors), tensors.update({f"{LAYER}.alpha": torch.tensor(1e9)})),
    )
    nothing = lambda tensors: None  # noqa: E731
    changed("nested metadata", "", nothing, lora_adapter_metadata=NESTED)
    changed("listed metadata", "", nothing, lora_adapter_metadata="[1]")
    alpha = {"transformer.lora_alpha": "x", "transformer.r": 4}
    changed("metadata's alpha", "lora_alpha is no finite number", nothing, lora_adapter_metadata=json.dumps(alpha))
    with_config("pattern", "is a regular expression", alpha_pattern={"(x+x+)+y": 1})
    with_config("pattern's value", "lora_alpha is no finite number", alpha_pattern={"x_embedder": [1]})
    with_config("patterns", "its alpha_pattern is no object", alpha_pattern=["x"])
    many = {f"x{number}": 1 for number in range(70_000)}
    with_config("many patterns", "its alpha_pattern has 70000 entries", alpha_pattern=many)
    with_config("config's alpha", "lora_alpha is no finite number", lora_alpha="4")
    with_config("config's large alpha", "lora_alpha is no finite number", lora_alpha=10**400)
    peft("config's nan", "lora_alpha is no finite number", '{"r": 4, "lora_alpha": NaN}')
    peft("listed config", "adapter_config.json is no object", "[1]")
    peft("nested config", "", NESTED)
    peft("long config", "has more than 1 MiB", json.dumps({"x": "y" * 2_000_000}))
    piped = make_peft_lora(folder / "piped", checkpoint, "x_embedder")
    (piped / "adapter_config.json").unlink()
    os.mkfifo(piped / "adapter_config.json")
    found["piped config"] = piped, ""
    (folder / "empty.safetensors").touch()
    found["empty"] = folder / "empty.safetensors", ""
    torn = folder / "torn.safetensors"
    shutil.copy(good, torn)
    os.truncate(torn, torn.stat().st_size // 2)
    found["torn"] = torn, ""
    return found
