"""Latency and throughput of a running images server under load: `python -m benchmarks.benchmark_serving`.

Works with any server of OpenAI's `/v1/images/edits` or `/v1/images/generations`. What a server does not report is n/a:
queue times, mask ratio and cache hits come from Stencil's `stencil` object, worker seconds from its /metrics. An open
loop: edits are sent when they are due, whatever has come back, and latency counts from then. A failed edit counts as
infinite and misses its SLO.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Run, Target, WarmUpError, send_on_time, spent_between, warm_up, worker_seconds
from benchmarks.load.dataset import EditCall, Mix, from_folder, from_trace, generations, read_trace, synthetic
from benchmarks.load.lone import measure_lone
from benchmarks.load.summary import Context, Spread, Summary, summarise
from benchmarks.report import print_report

DATASETS = ("synthetic", "folder", "trace", "generations")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        calls, due = _calls(args), _due(args)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        parser.error(str(error))
    try:
        summary = asyncio.run(_run(args, calls, due))
    except WarmUpError as error:
        parser.exit(1, f"error: {error}\n")
    result = {"benchmark": "serving", **_settings(args), **as_json(summary)}
    if args.save_result:
        _save(result, args.result_dir)
    print_report(_title(args), rows(summary), result)


async def _run(args: argparse.Namespace, calls: Sequence[EditCall], due: Sequence[float]) -> Summary:
    target = Target(
        url=args.base_url,
        model=args.model,
        api_key=args.api_key,
        extra=args.extra_body,
        partial_images=args.partial_images,
        timeout=args.timeout,
        sends_slo=args.send_slo,
    )
    first, calls = calls[: args.num_warmups], calls[args.num_warmups :]
    await warm_up(target, first, args.warmup_concurrency)
    if args.slo_scale is not None:
        lone = await measure_lone(target, first, [call.steps for call in calls])
        calls = lone.scaled(calls, args.slo_scale)
    elif args.slo_ms is not None:
        calls = [replace(call, slo_ms=call.slo_ms or args.slo_ms) for call in calls]
    context = Context(
        percents=args.metric_percentiles,
        request_rate=_offered(args, due),
        wants_first_image=args.partial_images > 0,
    )
    with tqdm(total=len(calls), unit="edit", disable=args.disable_tqdm) as progress:
        sending = send_on_time(target, calls, due, max_concurrency=args.max_concurrency, on_done=progress.update)
        return await measure(target, calls, sending, context)


async def measure(
    target: Target, calls: Sequence[EditCall], sending: Coroutine[Any, Any, Run], context: Context
) -> Summary:
    """A run's figures, with what the server's workers computed meanwhile. sending: of these calls."""
    before = await worker_seconds(target)
    run = await sending
    spent = spent_between(before, await worker_seconds(target))
    areas = [call.area for call in calls if call.area is not None]
    return summarise(run, replace(context, areas=areas, worker_seconds=spent))


def _calls(args: argparse.Namespace) -> list[EditCall]:
    """Warm-ups first. A trace's are its first lines, which then come once more."""
    number, random = args.num_warmups + args.num_prompts, np.random.default_rng(args.seed)
    mix = Mix(args.mask_ratio_dist, args.template_reuse, args.num_templates, args.num_inference_steps, args.sizes)
    if args.slo_scale is not None and not args.num_warmups:
        raise ValueError("--slo-scale needs --num-warmups, which tell how long a lone edit takes")
    if args.dataset == "synthetic":
        return synthetic(mix, number, random)
    if args.dataset == "generations":
        return generations(mix, number, random)
    if args.dataset_path is None:
        raise ValueError(f"--dataset {args.dataset} needs --dataset-path")
    if args.dataset == "folder":
        return from_folder(mix, args.dataset_path, number, random)
    lines = read_trace(args.dataset_path, args.num_prompts)
    return from_trace(mix, [*lines[: args.num_warmups], *lines], random)


def _due(args: argparse.Namespace) -> list[float]:
    random = np.random.default_rng([args.seed, 1])  # other than the edits': rates are compared on the same ones
    return due_times(args.arrivals, args.num_prompts, args.request_rate, args.burstiness, random)


def _offered(args: argparse.Namespace, due: Sequence[float]) -> float:
    """Edits per second as they were drawn."""
    return len(due) / due[-1] if due and due[-1] else math.inf


def _by_stage(seconds: Mapping[str, float] | None) -> str:
    if seconds is None:
        return "n/a"
    parts = ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items())
    return f"{sum(seconds.values()):.2f} s: {parts}"


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The table that is printed."""
    return [
        ("edits, failed", f"{summary.num_edits}, {summary.num_failed}"),
        ("duration", f"{summary.seconds:.2f} s"),
        ("offered, throughput", f"{_number(summary.request_rate)}, {summary.throughput:.3f} edits/s"),
        ("goodput, median SLO", f"{_number(summary.goodput)} edits/s, {_number(summary.slo_ms, 0)} ms"),
        ("SLO attainment", _number(summary.slo_attainment)),
        ("achieved, less the shortest latency", f"{summary.achieved:.3f} edits/s"),
        ("keeps up", "n/a" if summary.keeps_up is None else "yes" if summary.keeps_up else "no"),
        ("worker seconds", _by_stage(summary.worker_seconds)),
        ("latency", _spread(summary.latency)),
        ("mean latency of completed", f"{_number(summary.latency_completed_ms, 0)} ms"),
        ("queue time", _spread(summary.queue)),
        ("time to first partial image", _spread(summary.first_image)),
        ("mask area, achieved mask ratio", f"{_number(summary.mask_area)}, {_number(summary.mask_ratio)}"),
        ("hit ratio", _number(summary.hit_ratio)),
        ("client: late (P99), CPU per edit", f"{summary.client_late_ms:.1f} ms, {summary.client_cpu_ms:.2f} ms"),
        *(("error", error) for error in summary.errors),
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "n/a"
    parts = [("mean", spread.mean), ("median", spread.median)]
    parts += [(f"P{percent:g}", value) for percent, value in spread.percentiles]
    return ", ".join(f"{name} {'inf' if value is None else format(value, '.0f')}" for name, value in parts) + " ms"


def as_json(summary: Summary) -> dict[str, Any]:
    """Flat: `latency_p99_ms` and so on."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(summary).items():
        if isinstance(value, Spread):
            flat |= {f"{name}_mean_ms": value.mean, f"{name}_median_ms": value.median}
            flat |= {f"{name}_p{percent:g}_ms": each for percent, each in value.percentiles}
        elif isinstance(value, float) and math.isinf(value):
            flat[name] = None
        else:
            flat[name] = value
    return flat


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the result was measured with; secrets left out."""
    names = [
        *("base_url", "model", "dataset", "num_prompts", "burstiness", "max_concurrency", "mask_ratio_dist"),
        *("template_reuse", "num_inference_steps", "sizes", "arrivals", "seed", "extra_body"),
        *("slo_scale", "send_slo"),
    ]
    return {name: getattr(args, name) for name in names}


def _title(args: argparse.Namespace) -> str:
    return (
        f"{args.num_prompts} edits to {args.base_url}: {args.dataset}, {args.arrivals} arrivals, "
        f"steps {args.num_inference_steps}, masks {args.mask_ratio_dist}, templates {args.template_reuse}"
    )


def _save(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    (folder / f"serving-{result['num_prompts']}-{moment}.json").write_text(json.dumps(result, indent=1) + "\n")


def make_parser() -> argparse.ArgumentParser:
    """The flags, named as in `vllm bench serve` where the meaning is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--model", help="the field `model`; left out by default")
    parser.add_argument("--api-key", default="none", help="sent as a bearer token")
    parser.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of every edit")
    parser.add_argument("--partial-images", type=int, default=0, help="asked for as a stream; 0: no stream")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one edit")
    edits = parser.add_argument_group("edits")
    edits.add_argument("--dataset", choices=DATASETS, default="synthetic", help="where pictures and masks come from")
    edits.add_argument("--dataset-path", type=Path, help="folder of pictures, or file of JSON lines")
    edits.add_argument("--num-prompts", type=int, default=100, help="edits")
    edits.add_argument("--mask-ratio-dist", default="public", help="area: flashps-prod, public, viton or fixed:R")
    edits.add_argument("--template-reuse", default="zipf:1.05", help="zipf:A, unique or fixed:N")
    edits.add_argument("--num-templates", type=int, default=60, help="of the Zipf law")
    edits.add_argument("--num-inference-steps", default="8", help="N, uniform:LOW-HIGH or choice:A,B,..")
    edits.add_argument("--sizes", default="256x256", help="WxH,WxH,.. of synthetic pictures")
    edits.add_argument("--seed", type=int, default=0, help="of all draws")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="edits per second; inf: all at once")
    load.add_argument("--burstiness", type=float, default=1.0, help="shape of the Gamma law of intervals; 1 = Poisson")
    load.add_argument("--arrivals", default="poisson", help="poisson, windows:RATE/CV/SECONDS,.. or trace:FILE")
    load.add_argument("--max-concurrency", type=int, help="edits under way at once; waiting for a place is latency")
    load.add_argument("--num-warmups", type=int, default=4, help="edits sent before, not counted")
    load.add_argument("--warmup-concurrency", type=int, default=4, help="of these")
    slo = parser.add_argument_group("report")
    slo.add_argument("--slo-ms", type=float, help="latency that an edit should keep")
    slo.add_argument("--slo-scale", type=float, help="instead: so many times what an edit of its steps takes alone")
    slo.add_argument("--send-slo", action="store_true", help="tell the server each edit's SLO, as its `timeout`")
    slo.add_argument("--metric-percentiles", type=_percents, default=[95.0, 99.0], help="P,P,.. of latencies")
    slo.add_argument("--save-result", action="store_true", help="write the JSON to --result-dir as well")
    slo.add_argument("--result-dir", type=Path, default=Path("results"), help="folder")
    slo.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def _percents(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
