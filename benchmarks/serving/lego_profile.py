"""Known: what is known of the models of a Layout without loading them; and the profile that servers and simulations
predict from, measured once for each base model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import msgspec

from benchmarks.serving.lego_layout import Layout
from core.cache_folder import user_cache_folder
from core.config import ModelConfig
from core.handles import LoadedComponent
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from entrypoints.catalog import read_catalog
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.probes.cost_probe import known_or_probed, profile_path
from model_executor.worker.probes.joint_profiler import joint_samples
from model_executor.worker.probes.profiler import keep, profile

COMMON = ModelConfig(dtype="float32", device="cpu", threads=1, mask_aware=False)
"""As the servers' flags say."""

FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--no-mask-aware", "--no-playground")

LARGEST = 4
"""Requests of the largest batch that is profiled."""


@dataclass(frozen=True)
class Known:
    """infos: by name. sizes: of all components. samples: of the profile, of all models."""

    infos: dict[str, ModelInfo]
    sizes: tuple[LoadedComponent, ...]
    samples: tuple[CostSample, ...]


def known(layouts: Sequence[Layout], degrees: Sequence[int]) -> list[Known]:
    """Of each layout, as its workers report them; all have models of the same names. degrees: above 1, that are
    profiled, too. What has no profile in the cache folder is profiled before: it takes a minute.
    """
    catalogs = [{each.name: each for each in read_catalog(layout.catalog, COMMON).models} for layout in layouts]
    with ProcessPoolExecutor(1, get_context("spawn"), set_threads, (COMMON.threads,)) as pool:
        for base in dict.fromkeys(map(base_of, catalogs[0])):
            pool.submit(_profile, base, catalogs, degrees).result()
        return [pool.submit(_known, catalog).result() for catalog in catalogs]


def base_of(workflow: str) -> str:
    """The base model of a workflow of a Layout."""
    return workflow.rpartition("-")[0]


def _known(catalog: Mapping[str, ModelConfig]) -> Known:
    ready = ResidentModels.open(tuple(catalog.values())).ready(0)
    samples = known_or_probed({}, ready.models, user_cache_folder(os.environ), catalog)
    return Known({info.name: info for info in ready.models}, ready.sizes, samples)


def _profile(base: str, catalogs: Sequence[Mapping[str, ModelConfig]], degrees: Sequence[int]) -> None:
    """Profile a base model, unless it was, for all of its workflows."""
    quiet_libraries()
    folder = user_cache_folder(os.environ)
    users = [(info, config) for catalog in catalogs for info, config in _users(base, catalog)]
    if all(profile_path(info, config, folder).exists() for info, config in users):
        return
    measured = next(config for name, config in catalogs[0].items() if base_of(name) == base)
    samples = joint_samples(measured, degrees, COMMON.threads) if degrees else []
    models = ResidentModels.open((measured,))
    models.load_all()
    models.warm_up()
    for info in models.ready(0).models:
        samples += profile(models.families[info.name], info, LARGEST)
    for info, config in users:
        keep([msgspec.structs.replace(sample, model=info.name) for sample in samples], info, config, folder)


def _users(base: str, catalog: Mapping[str, ModelConfig]) -> list[tuple[ModelInfo, ModelConfig]]:
    """The workflows of a base model."""
    models = ResidentModels.open(tuple(config for name, config in catalog.items() if base_of(name) == base))
    return [(info, catalog[info.name]) for info in models.ready(0).models]
