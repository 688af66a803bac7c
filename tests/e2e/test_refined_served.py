"""A base model with a refiner: through an engine offline and behind the API, against diffusers' composition."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from pictures import Pixels, decode
from pipeline_rig import PROMPT
from refined_rig import GUIDANCE, SEED, SOLVERS, Asked, Composition
from served_edits import client_of
from server_process import ServerProcess, fork

from core.config import ModelConfig, RequestDefaults
from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from entrypoints import Edit, ImageEngine

EDIT, GENERATION = Asked(5, 0.6, is_edit=True), Asked(5, 0.6, is_edit=False)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return Composition(tmp_path_factory.mktemp("models"), SOLVERS["euler"], SOLVERS["dpm"] | KARRAS)


KARRAS: dict[str, Any] = {}
