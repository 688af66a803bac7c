"""Which checkpoints make a segmenter, and what is said about damaged files. Each error is one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from segmenter_rig import load_segmenter, open_checkpoint

from core.errors import ConfigError
from model_executor.segmenters.clipseg import ClipSeg
from model_executor.segmenters.grounded_sam import GroundedSam
from model_executor.segmenters.registry import make_segmenter
from model_executor.segmenters.sam2 import Sam2
from model_executor.segmenters.sam3 import Sam3
from tools.random_segmenter_checkpoints import make_clipseg, make_grounding_dino, make_sam2, make_sam3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind."""
    root = tmp_path_factory.mktemp("segmenters")
    make_clipseg(root / "clipseg", things=("hat",))
    make_sam2(root / "sam2")
    make_sam3(root / "sam3")
    make_grounding_dino(root / "dino")
    make_grounding_dino(root / "mm", is_mm=True)
    return root


@pytest.mark.parametrize(
    ("names", "cls", "parts", "takes"),
    [
        (["clipseg"], ClipSeg, ["segmenter"], {"words", "points", "box"}),
        (["sam2"], Sam2, ["segmenter"], {"points", "box"}),
        (["sam3"], Sam3, ["segmenter"], {"words", "box"}),
        (["sam2", "dino"], GroundedSam, ["segmenter", "detector"], {"words", "points", "box"}),
        (["mm", "sam2"], GroundedSam, ["segmenter", "detector"], {"words", "points", "box"}),
    ],
)
def test_checkpoints(root: Path, names: Sequence[str], cls: type, parts: Sequence[str], takes: set[str]) -> None:
    segmenter = make_segmenter([open_checkpoint(root / name) for name in names])
    assert type(segmenter) is cls
    assert list(segmenter.parts) == parts
    assert segmenter.takes == takes
    assert {checkpoint.class_name for checkpoint in segmenter.parts.values()} - {"Sam2Model"} <= {
        "CLIPSegForImageSegmentation",
        "Sam3Model",
        "GroundingDinoForObjectDetection",
        "MMGroundingDinoForObjectDetection",
    }
    assert segmenter.parts["segmenter"].class_name[:4] in ("CLIP", "Sam2", "Sam3")


@pytest.mark.parametrize("names", [[], ["dino"], ["sam2", "sam2"], ["clipseg", "sam2"], ["dino", "sam3"]])
def test_checkpoints_that_make_none(root: Path, names: Sequence[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"makes no segmenter; give one of CLIPSeg, SAM 2 or SAM 3, or one of"
    ) as raised:
        make_segmenter([open_checkpoint(root / name) for name in names])
    assert "\n" not in str(raised.value)


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | entries))


CUT = '{"size": {"height'

HOSTILE = [
    ("clipseg", "tokenizer.json", None, "cannot load the tokenizer of .*it has no"),
    ("clipseg", "tokenizer.json", "{}", "cannot load the tokenizer of "),
    ("clipseg", "tokenizer_config.json", "[", "cannot load the tokenizer of "),
    ("clipseg", "preprocessor_config.json", None, "cannot read .*preprocessor_config.json: "),
    ("clipseg", "preprocessor_config.json", CUT, "cannot read .*preprocessor_config.json: "),
    ("clipseg", "preprocessor_config.json", "[1]", "describes no ViTImageProcessorPil"),
    ("clipseg", "preprocessor_config.json", '{"size": "large"}', "describes no ViTImageProcessorPil"),
    ("clipseg", "preprocessor_config.json", '{"size": {"height": 64, "width": 32}}', "are no squares"),
    ("clipseg", "preprocessor_config.json", '{"size": {"shortest_edge": 64}}', "are no squares"),
    ("clipseg", "things.json", "{}", "things.json is no list of nouns"),
    ("clipseg", "things.json", '["hat", 3]', "things.json is no list of nouns"),
    ("clipseg", "things.json", "[]", "things.json is no list of nouns"),
    ("clipseg", "things.json", "[" * 100_000, "cannot read .*things.json: "),
    ("sam2", "preprocessor_config.json", None, "cannot read .*preprocessor_config.json: "),
    ("sam2", "preprocessor_config.json", CUT, "cannot read .*preprocessor_config.json: "),
    ("sam2", "preprocessor_config.json", "3", "preprocessor_config.json: Expected `object`, got `int`"),
    ("sam2", "preprocessor_config.json", "{}", "preprocessor_config.json: Object missing required field `size`"),
    ("sam2", "processor_config.json", "{", "cannot read .*processor_config.json: "),
    ("sam3", "processor_config.json", '{"image_processor": 3}', "processor_config.json: Expected `object`"),
    ("sam3", "processor_config.json", None, "cannot read .*preprocessor_config.json: "),
    ("sam3", "tokenizer.json", None, "cannot load the tokenizer of .*it has no"),
    ("dino", "tokenizer.json", None, "cannot load the tokenizer of .*it has no"),
    ("dino", "preprocessor_config.json", '{"size": 3.5}', "describes no GroundingDinoImageProcessorPil"),
]


def check_refused(copy: Path, sam2: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        make_segmenter([open_checkpoint(path) for path in ([copy, sam2] if copy.name == "dino" else [copy])])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "file", "content", "words"), HOSTILE)
def test_damaged_files(root: Path, tmp_path: Path, name: str, file: str, content: str | None, words: str) -> None:
    """None: the file is missing."""
    copy = shutil.copytree(root / name, tmp_path / name)
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    check_refused(copy, root / "sam2", words)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"size": {"height": 128, "width": 128}}, "prepares 128x128 pixels where config.json has 64x64"),
        ({"resample": 3}, "Invalid enum value 3 - at `$.resample`"),
        ({"image_std": [1, 0, 1]}, "without resizing or normalising"),
        ({"image_mean": [0.5]}, "Expected `array` of length 3, got 1 - at `$.image_mean`"),
        ({"do_normalize": False}, "without resizing or normalising"),
    ],
)
def test_pictures_cannot_be_prepared(root: Path, tmp_path: Path, entries: dict[str, Any], words: str) -> None:
    copy = shutil.copytree(root / "sam2", tmp_path / "sam2")
    edit(copy / "preprocessor_config.json", **entries)
    check_refused(copy, copy, re.escape(words))


@pytest.mark.parametrize("name", ["clipseg", "sam2", "sam3", "dino"])
@pytest.mark.parametrize("nonsense", [3, "x", None, [], {"hidden_size": "wide"}])
def test_a_config_of_nonsense(root: Path, tmp_path: Path, name: str, nonsense: Any) -> None:
    """Some of it is read as the defaults, which do not fit the other files."""
    copy = shutil.copytree(root / name, tmp_path / name)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    edit(copy / "config.json", **dict.fromkeys((key for key in config if key.endswith("_config")), nonsense))
    with pytest.raises(ConfigError) as raised:
        load_segmenter(*([copy, root / "sam2"] if name == "dino" else [copy]))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_another_model(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root / "clipseg", tmp_path / "clipseg")
    config = json.loads((copy / "config.json").read_text("utf-8"))
    edit(copy / "config.json", text_config=config["text_config"] | {"vocab_size": 100})
    check_refused(
        copy, copy, "it makes tokens up to number 513 where the text encoder's config.json has a vocab_size of 100"
    )


def test_a_part_that_is_no_such_class(root: Path, tmp_path: Path) -> None:
    """What a user would get who names a folder of another model."""
    copy = shutil.copytree(root / "sam2", tmp_path / "sam2")
    edit(copy / "config.json", model_type="bert", architectures=["BertModel"])
    with pytest.raises(ConfigError, match=r"has no model_index.json"):
        open_checkpoint(copy)
