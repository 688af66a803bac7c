"""Reads a catalog: a TOML file that lists the models of a server, each with settings of its own.

    [[model]]
    name = "fill"
    path = "checkpoints/flux-fill"     # or a hub id; left out: the embedded model
    dtype = "bfloat16"
    loras = { shirt = "loras/shirt.safetensors" }
    segmenter = "checkpoints/clipseg"  # finds masks; or a list of two
    controlnets = ["edges", "union"]
    refiner = "polish"                 # the name of another entry
    defaults = { num_inference_steps = 40, refiner_start = 0.8 }

    [controlnets]                      # which models name
    edges = "checkpoints/controlnet-canny"
    union = { path = "checkpoints/union", types = { canny = 0, depth = 2 } }  # one for several kinds of pictures

    [engines]                          # others have all models
    0 = ["fill", "polish"]

What an entry leaves out is as the server's flags say. Paths are relative to the file's folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core.config import EMBEDDED_MODEL, AdapterConfig, ControlNetConfig, ModelConfig, RequestDefaults
from core.errors import ConfigError, InvalidRequestError
from core.paths import expanded
from core.sampler_defaults import SamplerDefaults
from entrypoints.model_paths import check_model, is_hub_id, named_segmenter
from entrypoints.serve_flags import flags_of

OF_THE_SERVER = {"device": "--device", "threads": "--threads"}
"""Settings that all models of a server share -> their flag."""

SETTINGS = tuple(flag.sets for flag in flags_of(ModelConfig) if flag.sets not in OF_THE_SERVER)
"""Keys of an entry that are fields of ModelConfig."""

OF_REQUESTS = ("workflow", "refiner", "roles")
"""Further keys of an entry that are fields of ModelConfig, without a flag."""

MAX_DIGITS = 9
"""Most digits of an engine's number."""

KEYS = ("name", "path", "loras", *SETTINGS, "controlnets", *OF_REQUESTS, "defaults")


class Catalog(NamedTuple):
    """The content of a catalog."""

    models: tuple[ModelConfig, ...]  # at least one
    engines: dict[int, tuple[str, ...]]  # number of an engine -> names of its models, which need not exist


def read_catalog(file: Path, common: ModelConfig) -> Catalog:
    """Read a catalog. common: what the flags say of all models. Raises ConfigError that names the file, the entry and
    its key."""
    content = _read(file)
    entries = content.get("model", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file} lists no model: each is a table that begins with [[model]]")
    controlnets = _controlnets(file, content.get("controlnets", {}))
    models = tuple(_Entry(file, number, entry, controlnets).config(common) for number, entry in enumerate(entries, 1))
    return Catalog(models, _engines(file, content.get("engines", {})))


def _engines(file: Path, table: object) -> dict[int, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise ConfigError(f'{file}: engines: is a table: [engines], and a line 0 = ["name of a model"] for each')
    engines: dict[int, tuple[str, ...]] = {}
    for key, names in table.items():
        where = f"{file}: engines: {key}"
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS):
            raise ConfigError(f"{where}: is no engine's number; they are numbered from 0")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{where}: is a list of models' names")
        if int(key) in engines:
            raise ConfigError(f"{where}: engine {int(key)} is listed twice")
        engines[int(key)] = tuple(names)
    return engines


def _read(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the catalog {file}: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise ConfigError(f"the catalog {file} is no TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the catalog {file} cannot be read: it is nested too deeply") from error
    if unknown := sorted(content.keys() - {"model", "engines", "controlnets"}):
        raise ConfigError(f"{file}: {unknown[0]} is not known; models are tables that begin with [[model]]")
    return content


def _controlnets(file: Path, table: object) -> dict[str, ControlNetConfig]:
    """Name -> the ControlNet."""
    if not isinstance(table, dict):
        raise ConfigError(f'{file}: controlnets: is a table: [controlnets], and a line name = "path" for each')
    return {name: _controlnet(file, name, value) for name, value in table.items()}


def _controlnet(file: Path, name: str, value: object) -> ControlNetConfig:
    """value: its path, or a table with that and its types."""
    where = f"{file}: controlnets: {name}"
    entry: dict[str, Any] = value if isinstance(value, dict) else {"path": value}
    if unknown := sorted(entry.keys() - {"path", "types"}):
        raise ConfigError(f"{where}: {unknown[0]} is not known; there are path, types")
    if not isinstance(path := entry.get("path"), str) or not path:
        raise ConfigError(f"{where}: its path is the text of a directory or a hub id")
    try:
        folder = file.parent / expanded(path)
        if not folder.exists() and not is_hub_id(path):
            raise ConfigError(f"{where}: there is no directory '{folder}'")
        return ControlNetConfig(name, str(folder) if folder.exists() else path, entry.get("types", {}))
    except (ConfigError, InvalidRequestError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(reason if reason.startswith(where) else f"{where}: {reason}") from error


class _Entry:
    """One model of a catalog, as written. controlnets: of the catalog, by name."""

    def __init__(
        self, file: Path, number: int, entry: Mapping[str, Any], controlnets: Mapping[str, ControlNetConfig]
    ) -> None:
        self._file, self._entry, self._controlnets = file, entry, controlnets
        self._where = f"{file}, model {number}"

    def config(self, common: ModelConfig) -> ModelConfig:
        self._check_keys()
        own = {key: self._entry[key] for key in (*SETTINGS, *OF_REQUESTS) if key in self._entry}
        if "segmenter" in own:
            own["segmenter"] = self._segmenter(own["segmenter"])
        name, loras = self._text("name", self._entry.get("name", "")), self._entry.get("loras", {})
        if not isinstance(loras, dict):
            raise self._refuse("loras", 'is a table: loras = { name = "file" }')
        adapters = tuple(self._adapter(each, value) for each, value in loras.items())
        named = {"model": self._model(), "served_model_name": name, "adapters": adapters, "controlnets": self._nets()}
        defaults = self._known("defaults", self._entry.get("defaults", {}), RequestDefaults)
        try:
            return ModelConfig(
                **(msgspec.structs.asdict(common) | own | named | {"defaults": RequestDefaults(**defaults)})
            )
        except InvalidRequestError as error:
            raise self._refuse(error.param or "", str(error)) from error
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error

    def _check_keys(self) -> None:
        for key in self._entry:
            if key in OF_THE_SERVER:
                raise self._refuse(key, f"all models share it; give {OF_THE_SERVER[key]}")
            if key not in KEYS:
                raise self._refuse(key, f"is not known; there are {', '.join(KEYS)}")

    def _known(self, key: str, table: object, kind: type[SamplerDefaults]) -> dict[str, Any]:
        """What requests leave open, by its name."""
        known = kind.__struct_fields__
        if not isinstance(table, dict) or (unknown := sorted(table.keys() - {*known})):
            what = f"{unknown[0]} is not known" if isinstance(table, dict) else "is a table"
            raise self._refuse(key, f"{what}; there are {', '.join(known)}")
        return table

    def _model(self) -> str:
        """The checkpoint's directory or hub id."""
        path = self._text("path", self._entry.get("path", EMBEDDED_MODEL))
        try:
            folder = self._file.parent / expanded(path)
            model = path if is_hub_id(path) and not folder.exists() else str(folder)
            check_model(model)
        except (ConfigError, OSError) as error:
            raise self._refuse("path", getattr(error, "strerror", None) or str(error)) from error
        return model

    def _nets(self) -> tuple[ControlNetConfig, ...]:
        """The ControlNets that it names."""
        names = self._entry.get("controlnets", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refuse("controlnets", "is a list of names of the table [controlnets]")
        if unknown := [name for name in names if name not in self._controlnets]:
            known = ", ".join(self._controlnets) or "none"
            raise self._refuse("controlnets", f"there is no {unknown[0]} in [controlnets]; there are {known}")
        return tuple(self._controlnets[name] for name in dict.fromkeys(names))

    def _segmenter(self, value: object) -> tuple[str, ...]:
        """The directories or hub ids of its segmenter's checkpoints. value: one, or a list."""
        found = []
        for each in value if isinstance(value, list) else [value]:
            path = named_segmenter(self._text("segmenter", each))
            try:
                folder = self._file.parent / expanded(path)
                found.append(str(folder) if folder.exists() else path)
            except (ConfigError, OSError) as error:
                raise self._refuse("segmenter", getattr(error, "strerror", None) or str(error)) from error
        return tuple(found)

    def _adapter(self, name: str, value: object) -> AdapterConfig:
        """value: the path of its file, or a table with that and the defaults of its requests."""
        if not isinstance(value, dict):
            return AdapterConfig(name, self._lora(name, value))
        if unknown := sorted(value.keys() - {"path", "defaults"}):
            raise self._refuse("loras", f"{name}: {unknown[0]} is not known; there are path, defaults")
        if "path" not in value:
            raise self._refuse("loras", f"{name}: a table has its path")
        defaults = self._known(f"loras: {name}: defaults", value.get("defaults", {}), SamplerDefaults)
        try:
            return AdapterConfig(name, self._lora(name, value["path"]), SamplerDefaults(**defaults))
        except InvalidRequestError as error:
            raise self._refuse(f"loras: {name}: defaults", str(error)) from error

    def _lora(self, name: str, path: object) -> str:
        try:
            file = self._file.parent / expanded(self._text("loras", path))
            if file.exists():
                return str(file)
        except (ConfigError, OSError) as error:
            raise self._refuse("loras", f"{name}: {getattr(error, 'strerror', None) or error}") from error
        raise self._refuse("loras", f"there is no file '{file}' for {name}")

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._refuse(key, f"is text, not {type(value).__name__}")
        return value

    def _refuse(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key}: {reason}")
