"""Writes the table of model families in docs/models.md: `python -m tools.family_table`

What a family can do is read from small random checkpoints, one or more of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare.checkpoints import MAKERS
from core.model_info import ModelInfo
from model_executor.checkpoint.describe import describe, families
from model_executor.models.registry import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- Written by python -m tools.family_table -->\n", "<!-- To here -->\n"
HEAD = """| family | checkpoints of this layout | edits | the picture is seen | references | guidance | steps | LoRA |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
YES, NO = "yes", "no"


def family_table() -> str:
    """The table's text, a line for each family."""
    with tempfile.TemporaryDirectory() as folder:
        found = [describe(str(make(Path(folder) / name))).info for name, make in MAKERS.items()]
    infos = {info.family: info for info in reversed(found)}
    adapted = {family.family: hasattr(family, "lora_loader") for family in FAMILIES.values()}
    lines = []
    for card in families():
        info = infos[card.name]
        cells = [
            f"`{card.name}`",
            card.checkpoints,
            "mask-aware" if info.can_edit else NO,
            _seen(info),
            "" if info.references is None else str(info.references.most),
            ", ".join(_guidance(info)),
            str(info.default_num_inference_steps),
            YES if adapted[card.name] else NO,
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def _seen(info: ModelInfo) -> str:
    """How the denoiser sees the picture that is edited, besides its noised latents."""
    if not info.conditions_per_token:
        return ""
    return "as tokens, and by the text encoder" if info.vision else "as tokens"


def _guidance(info: ModelInfo) -> Iterator[str]:
    if info.has_guidance:
        yield "classifier-free" if info.is_guidance_cfg else "distilled"
    if info.has_true_cfg:
        yield "`true_cfg_scale`"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{family_table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
