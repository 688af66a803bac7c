"""Lists the model families that can be served, or describes a checkpoint: `python -m entrypoints.models [--model M]`

Prints a checkpoint's parameter counts, tokens and cache bytes by picture size, the request fields it takes, and with
--lora whether an adapter fits. Reads no weights. The part that needs torch runs in a child process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from core.model_card import CheckpointCard, FamilyCard
from core.model_info import ModelInfo
from entrypoints.flag_types import named_adapter

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((512, 512), (768, 768), (1024, 768), (1024, 1024), (1536, 1024))
"""Picture sizes (width, height) in pixels to print; those above the model's limit are left out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0, or 1 after an error, printed as one line on stderr."""
    args = _parse(argv)
    command = [sys.executable, "-m", "model_executor.checkpoint.describe", *_arguments(args)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        nothing = f"error: the process that reads the checkpoint ended with status {done.returncode} and said nothing"
        print(lines[-1] if lines else nothing, file=sys.stderr)
        return 1
    if args.model:
        print(*_describe(msgspec.json.decode(done.stdout, type=CheckpointCard)), sep="\n")
    else:
        print(*_list(msgspec.json.decode(done.stdout, type=list[FamilyCard])), sep="\n")
    return 0


def _arguments(args: argparse.Namespace) -> list[str]:
    return [args.model, *(f"{lora.name}={lora.path}" for lora in args.loras)] if args.model else []


def _list(families: Iterable[FamilyCard]) -> Iterable[str]:
    for family in families:
        yield f"{family.name}: {family.checkpoints}\n  {family.summary}\n  {', '.join(family.pipelines)}"


def _describe(card: CheckpointCard) -> Iterable[str]:
    info = card.info
    yield f"{info.name}: {card.pipeline}, family {info.family}"
    total = sum(card.parameters.values())
    yield f"parameters {_short(total)}: {', '.join(f'{part} {_short(n)}' for part, n in card.parameters.items())}"
    reads = f"up to {info.max_text_tokens} text tokens" if info.max_text_tokens else f"{info.num_classes} classes"
    yield f"{card.scheduler}, {info.default_num_inference_steps} steps, {reads}"
    yield f"takes {', '.join(_fields(info))}"
    for adapter in card.adapters:
        rank = "-".join(map(str, sorted(set(adapter.ranks))))
        size = f"{adapter.num_layers} layers, rank {rank}, {_short(adapter.parameters)} parameters"
        brought = {name: value for name, value in msgspec.structs.asdict(adapter.defaults).items() if value is not None}
        yield f"adapter {adapter.name}: {', '.join([size, *(f'{name} {value}' for name, value in brought.items())])}"
    if card.layout is None:
        yield f"pictures of {info.native_size} x {info.native_size} px"
        return
    pages = f"{card.layout.num_blocks} {card.layout.dtype} pages"
    yield f"cached per template: {card.num_keyframes} keyframes of {pages}"
    for width, height in _sizes(info):
        tokens, keyframe = card.tokens(width, height), card.layout.entry_bytes(card.tokens(width, height))
        whole = card.template_bytes(width, height)
        size = f"{width:4} x {height:4} px  {tokens:5} tokens"
        yield f"  {size}  {_bytes(keyframe)} a keyframe  {_bytes(whole)} a template"


def _fields(info: ModelInfo) -> Iterable[str]:
    """The request fields that this model takes, of those that depend on the model."""
    if info.num_classes:
        yield f"class_label (0 to {info.num_classes - 1})"
    else:
        yield from ("mask_aware", "strength", "hires_scale")
    if info.has_guidance:
        kind = "classifier-free" if info.is_guidance_cfg else "distilled"
        yield f"guidance_scale ({kind}, default {info.default_guidance_scale:g})"
    if info.has_true_cfg:
        yield f"true_cfg_scale (default {info.default_true_cfg_scale:g})"
    if info.can_edit and (info.has_true_cfg or info.is_guidance_cfg):
        yield "negative_prompt"
    if info.has_shift:
        yield "shift"


def _sizes(info: ModelInfo) -> Iterable[tuple[int, int]]:
    """The sizes of SIZES with at most the model's native number of pixels, and its native square, in order of area."""
    native = info.native_size
    sizes = {size for size in SIZES if size[0] * size[1] <= native**2} | {(native, native)}
    return sorted(sizes, key=lambda size: size[0] * size[1])


def _short(number: int) -> str:
    """`number` with three significant digits and a decimal prefix: 1234567 -> "1.23 M"."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{_short(number)}B".rjust(8)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m entrypoints.models", description="List the model families, or describe one checkpoint."
    )
    parser.add_argument("--model", help="diffusers directory or hub id")
    parser.add_argument(
        "--lora",
        dest="loras",
        action="append",
        default=[],
        type=named_adapter,
        metavar="NAME=PATH",
        help="a LoRA adapter to check against the model; may be repeated",
    )
    args = parser.parse_args(argv)
    if args.loras and not args.model:
        parser.error("--lora needs --model")
    return args


if __name__ == "__main__":
    sys.exit(main())
