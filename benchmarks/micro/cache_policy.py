"""How well the activation cache manager chooses what to keep, and its time per edit.

Edits draw their templates from a Zipf law over 10 times more than fit. The share of bytes found is compared, on equal
draws and budgets, with two simulations: an LRU without fragmentation that holds nothing for running edits, and Belady's
rule, which knows the future. Counted in bytes, where parts of a template may be evicted, that rule is the optimum
(Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np

from benchmarks.command import command
from benchmarks.load.draws import templates as popular_templates
from benchmarks.report import Row, Value, print_report
from benchmarks.simulation.machine import SCHEME as SIMULATED
from core.cache.activation_cache_manager import ActivationCacheManager, TierBudget
from core.cache.entry import EntryState, WantedEntry
from core.page_scheme import latents_key, page_key

SCHEME = msgspec.structs.replace(SIMULATED, keyframes=(1.0, 0.75, 0.5, 0.25, 0.0))
"""Pages of FLUX.1: 7.4 GB a template of 1024 x 1024 px. None of it is allocated here."""

SIDES = (32, 40, 48, 56, 64)  # sides of templates in tokens of 16 px

NUM_REQUESTS = 8
ALPHAS = (0.6, 0.8, 1.0, 1.2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, seed=0)
    parser.add_argument("--templates", type=int, default=500, help="how many there are; a tenth fits, at least 20")
    parser.add_argument("--edits", type=int, default=10_000, help="draws per Zipf exponent")
    args = parser.parse_args(argv)
    rows, result = list[Row](), dict[str, Value](benchmark="cache_policy")
    for alpha in ALPHAS:
        row, figures = _choice(args, alpha)
        rows.append(row)
        result |= figures
    title = f"cache manager, {NUM_REQUESTS} requests in flight, templates 10x more than fit, {args.edits} edits"
    print_report(title, rows, result, args.output)


def _choice(args: argparse.Namespace, alpha: float) -> tuple[Row, dict[str, float]]:
    templates = list(draw_templates(args.templates, Random(args.seed)))
    sizes = [nbytes_of(wants) for wants in templates]
    budget = sum(sizes) // 10
    draws = popular_templates(f"zipf:{alpha}", len(templates))(np.random.default_rng(args.seed), args.edits).tolist()
    start = time.perf_counter()
    ours = manager_hit_ratio(templates, draws, budget)
    cost = (time.perf_counter() - start) / len(draws) * 1e6
    lru, best = lru_hit_ratio(templates, draws, budget), belady_hit_ratio(sizes, draws, budget)
    values = f"{ours:.3f} / {lru:.3f} / {best:.3f}; {ours / lru:.3f} of LRU; {cost:.0f} us an edit"
    result = {"hit_ratio": ours, "lru_hit_ratio": lru, "belady_hit_ratio": best}
    row = f"bytes found, Zipf {alpha}: ours / LRU / optimum", values
    return row, {f"{name}_zipf_{alpha}": value for name, value in result.items()}


def draw_templates(number: int, random: Random) -> Iterator[list[WantedEntry]]:
    """Templates of any sides, each as the entries of all its keyframes."""
    for _ in range(number):
        yield template_wants(f"{random.getrandbits(256):064x}", random.choice(SIDES) * random.choice(SIDES))


def template_wants(template_key: str, num_tokens: int) -> list[WantedEntry]:
    layout, latent_bytes = SCHEME.layout, SCHEME.latent_entry_bytes(num_tokens)
    nbytes, block_bytes = layout.entry_bytes(num_tokens), layout.block_bytes(num_tokens)
    pages = [WantedEntry(page_key(template_key, sigma), nbytes, block_bytes) for sigma in SCHEME.keyframes]
    return [WantedEntry(latents_key(template_key), latent_bytes, latent_bytes), *pages]


def manager_hit_ratio(templates: Sequence[Sequence[WantedEntry]], draws: Sequence[int], budget: int) -> float:
    """Share of bytes that edits found, some of them running at any time."""
    manager, running, found = new_manager(budget), deque[Sequence[WantedEntry]](), 0
    for template in draws:
        if len(running) == NUM_REQUESTS:
            manager.release(want.key for want in running.popleft())
        found += edit(manager, templates[template])
        running.append(templates[template])
    manager.check_integrity()
    return found / sum(nbytes_of(templates[template]) for template in draws)


def edit(manager: ActivationCacheManager, wants: Sequence[WantedEntry]) -> int:
    """Reserve and prime; returns the bytes that were there."""
    if not manager.reserve(wants, _never):
        raise RuntimeError("the budget does not hold the templates of all running edits")
    found = 0
    for want in wants:
        if manager.state(want.key) is EntryState.READY:
            found += want.nbytes
        else:
            manager.fill(want.key)
    return found


def lru_hit_ratio(templates: Sequence[Sequence[WantedEntry]], draws: Sequence[int], budget: int) -> float:
    """Entries in the order of their last use, as many as the budget holds in bytes."""
    held: OrderedDict[str, int] = OrderedDict()
    used = found = asked = 0
    for template in draws:
        for want in templates[template]:
            asked += want.nbytes
            found += held.get(want.key, 0)
            used += want.nbytes - held.pop(want.key, 0)
            held[want.key] = want.nbytes
        while used > budget:
            used -= held.popitem(last=False)[1]
    return found / asked


def belady_hit_ratio(sizes: Sequence[int], draws: Sequence[int], budget: int) -> float:
    """Whenever there is too much, bytes of the template that is needed again last go first."""
    held = dict.fromkeys(draws, 0)  # template -> bytes of it that are there
    next_use = dict.fromkeys(draws, 0)
    farthest: list[tuple[int, int]] = []  # heap of (-next use, template); stale where next_use says otherwise
    used = found = 0
    for template, following in zip(draws, following_uses(draws), strict=True):
        found += held[template]
        used += sizes[template] - held[template]
        held[template], next_use[template] = sizes[template], following
        heapq.heappush(farthest, (-following, template))
        while used > budget:
            negative, victim = farthest[0]
            surplus = min(used - budget, held[victim]) if next_use[victim] == -negative else 0
            held[victim] -= surplus
            used -= surplus
            if not surplus or not held[victim]:
                heapq.heappop(farthest)
    return found / sum(sizes[template] for template in draws)


def following_uses(draws: Sequence[int]) -> list[int]:
    """For each edit the index of the next one of its template; beyond the end if there is none."""
    seen: dict[int, int] = {}
    following = [0] * len(draws)
    for index in range(len(draws) - 1, -1, -1):
        following[index] = seen.get(draws[index], len(draws) + draws[index])
        seen[draws[index]] = index
    return following


def new_manager(budget: int) -> ActivationCacheManager:
    return ActivationCacheManager([TierBudget("host", budget)], has_disk=False, page_arena_id=0, keep_all=True)


def nbytes_of(wants: Sequence[WantedEntry]) -> int:
    return sum(want.nbytes for want in wants)


def _never(tier: str, nbytes: int) -> bool:
    return False


if __name__ == "__main__":
    main()
