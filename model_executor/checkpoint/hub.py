"""Downloads checkpoints from the Hugging Face hub: chooses the files, and explains failures to the user."""

from __future__ import annotations

import json
from pathlib import Path

from core.errors import ConfigError
from model_executor.checkpoint.weights import variants
from model_executor.models.parts import CONTROLNETS, SEGMENTERS

INDEX = "model_index.json"
DEFAULTS = "generation_config.json"
CONFIG = "config.json"

SMALL_FILES = [INDEX, DEFAULTS, "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja"]
"""All files of a checkpoint but weights."""

SMALL_FILES_OF_ONE_PART = [
    CONFIG,
    "things.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
]
"""All files of a checkpoint of one part but weights."""

KNOWN_VARIANTS = ("fp16", "bf16", "non_ema")
"""Not downloaded unless asked for, since each is another full set of weights."""


def download(hub_id: str, variant: str) -> Path:
    """Download a checkpoint; returns its folder. Leaves out pickles, single-file weights in the repository's root, and
    all but one variant of each part. Raises ConfigError.
    """
    # Imported here: it takes 0.2 s and a model on disk does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    weights = [f"*/*.{variant}.safetensors", f"*/*.{variant}-*.safetensors"] if variant else ["*/*.safetensors"]
    ignored = [] if variant else [f"*/*.{name}{end}" for name in KNOWN_VARIANTS for end in (".*", "-*")]
    try:
        path = Path(snapshot_download(hub_id, allow_patterns=[INDEX, CONFIG]))
        if one_part_class(path) is not None:
            return Path(snapshot_download(hub_id, allow_patterns=_files_of_one_part(variant)))
        path = Path(snapshot_download(hub_id, allow_patterns=SMALL_FILES + weights, ignore_patterns=ignored))
        for part in _parts_without_weights(path):
            snapshot_download(hub_id, allow_patterns=[f"{part}/*.json", f"{part}/*.safetensors"])
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(_explain(hub_id, error)) from error
    return path


def one_part_class(folder: Path) -> str | None:
    """The class of a checkpoint of one part, which is saved without an index: one of `SEGMENTERS`, or of `CONTROLNETS`.
    None for any other folder."""
    if (folder / INDEX).is_file():
        return None
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    if (name := config.get("_class_name")) in CONTROLNETS:
        return str(name)
    model_type = config.get("model_type")
    return SEGMENTERS.get(model_type) if isinstance(model_type, str) else None


def _files_of_one_part(variant: str) -> list[str]:
    files = list[str]()
    for stem in ("model", "diffusion_pytorch_model"):  # of transformers, of diffusers
        names = [f"{stem}.{variant}", f"{stem}.{variant}-*"] if variant else [stem, f"{stem}-*"]
        files.append(f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json")
        files += [f"{name}.safetensors" for name in names]
    return [*SMALL_FILES_OF_ONE_PART, *files]


def _parts_without_weights(path: Path) -> list[str]:
    """Parts that are models, recognised by their config.json, but have no weights on disk."""
    if not (path / INDEX).is_file():
        return []
    named = json.loads((path / INDEX).read_text("utf-8"))
    folders = [path / part for part, value in named.items() if isinstance(value, list)]
    return [folder.name for folder in folders if (folder / "config.json").is_file() and not variants(folder)]


def _explain(hub_id: str, error: Exception) -> str:
    """One line that says what is wrong and what to do about it."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    match error:
        case GatedRepoError():
            page = f"https://huggingface.co/{hub_id}"
            return f"{hub_id} is gated: accept its terms at {page} and log in with 'hf auth login', or set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"the Hugging Face hub has no {hub_id}, or it is private: check the name, or set HF_TOKEN"
        case LocalEntryNotFoundError():
            return (
                f"{hub_id} is not in this machine's cache, and the Hugging Face hub cannot be reached: go online once "
                "(HF_HUB_OFFLINE unset), or give --model a directory"
            )
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"cannot get {hub_id} from the Hugging Face hub: {reason}"
