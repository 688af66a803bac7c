"""Measures the latency tables of a model on this machine: every op by batch size, steps by computed tokens, size of
the picture and number of ranks, too.

A worker starts from what its cost probe measures in two seconds. A profile takes minutes and is exact: `make profile`
makes one, kept beside the probe's samples per model and device, and the next start of a server reads it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import torch

from core.cache_folder import user_cache_folder
from core.config import EMBEDDED_MODEL, CudaGraphs, ModelConfig, Offload, SchedulerConfig
from core.ipc.atomic_file import write_atomically
from core.messages.worker import CostSample
from core.model_info import ModelInfo
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.device_failures import is_out_of_memory
from model_executor.models.base import Family
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.main import default_threads
from model_executor.worker.probes.cost_probe import Batches, Timed, profile_path
from model_executor.worker.probes.joint_profiler import joint_samples
from model_executor.worker.probes.timing import median_seconds


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    quiet_libraries()
    set_threads(args.threads)
    config = config_of(args)
    joint = joint_samples(config, degrees, args.threads) if (degrees := sorted({*args.degrees} - {1})) else []
    models = ResidentModels.open((config,))
    models.load_all()
    models.warm_up()
    for info in models.ready(0).models:
        samples = profile(models.families[info.name], info, args.max_num_seqs)
        samples += [sample for sample in joint if sample.model == info.name]
        path = keep(samples, info, config, user_cache_folder(os.environ))
        print(f"{info.name}: {len(samples)} batches measured, {path.stat().st_size / 1e3:.0f} kB in {path}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as for the server")
    parser.add_argument("--served-model-name", default="", help="as for the server")
    parser.add_argument("--dtype", default="auto", help="as for the server")
    parser.add_argument("--device", default="auto", help="as for the server")
    parser.add_argument("--cuda-graphs", default="auto", choices=get_args(CudaGraphs), help="as for the server")
    parser.add_argument("--offload", default="none", choices=get_args(Offload), help="as for the server")
    parser.add_argument("--batch-invariant", action="store_true", help="as for the server")
    parser.add_argument("--threads", type=int, default=default_threads(1), help="as for the server")
    parser.add_argument("--max-num-seqs", type=int, default=SchedulerConfig().max_num_seqs, help="largest batch")
    parser.add_argument(
        "--degrees", type=int, nargs="+", default=[1], help="numbers of ranks that compute a step together; 1 always"
    )
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The model as a server with these flags has it. Raises ConfigError for flags that exclude each other."""
    return ModelConfig(
        model=args.model,
        served_model_name=args.served_model_name,
        dtype=args.dtype,
        device=args.device,
        cuda_graphs=args.cuda_graphs,
        offload=args.offload,
        batch_invariant=args.batch_invariant,
    )


@torch.inference_mode()
def profile(family: Family, info: ModelInfo, largest: int) -> list[CostSample]:
    """Measure all tables, with batches of up to `largest` requests. Sizes that do not fit into memory are left out."""
    samples = list[CostSample]()
    for op, work, run in _batches(family, info, largest):
        try:
            seconds = median_seconds(run)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            continue
        samples.append(CostSample(info.name, op.cost_name, work, seconds, is_profile=True))
    return samples


def keep(samples: Sequence[CostSample], info: ModelInfo, config: ModelConfig, cache_folder: Path) -> Path:
    """Write a profile where workers with these settings look for it; the file. Raises OSError if that fails."""
    path = profile_path(info, config, cache_folder)
    write_atomically(path, msgspec.json.encode(samples))
    return path


def _batches(family: Family, info: ModelInfo, largest: int) -> Iterator[Timed]:
    """Ops that run their items one after the other are measured alone: their batches cost as the sum of them."""
    batches = Batches(family, info)
    yield from batches.once()
    yield from batches.steps(range(1, largest + 1))


if __name__ == "__main__":
    main()
