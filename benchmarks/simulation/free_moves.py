"""What a router could gain at most by balancing: edits that move between engines at no cost, at every moment."""

from __future__ import annotations

from benchmarks.simulation.machine import TEXT_TOKENS
from benchmarks.simulation.scenario import Scenario, make_trace


def latencies_moving_freely(scenario: Scenario, seed: int) -> list[float]:
    """Seconds by edit, in the order they end, where all engines always have the same to compute in a step, unless one
    edit alone is more than that. All pages are there, and nothing but steps takes time.
    """
    machine, edits, now, latencies = scenario.machine, make_trace(scenario, seed), 0.0, list[float]()
    running: list[list[float]] = []  # [steps left, seconds in a step, arrival]
    position = 0
    while position < len(edits) or running:
        share = sum(seconds for _, seconds, _ in running) / scenario.num_engines
        paces = [machine.step_seconds(0) + max(share, seconds) for _, seconds, _ in running]
        end = now + min((one[0] * pace for one, pace in zip(running, paces, strict=True)), default=float("inf"))
        arrival = edits[position].arrival if position < len(edits) else float("inf")
        for one, pace in zip(running, paces, strict=True):
            one[0] -= (min(end, arrival) - now) / pace
        now = min(end, arrival)
        if arrival <= end:
            edit, position = edits[position], position + 1
            tokens = edit.active.size + TEXT_TOKENS
            steps = float(edit.sampling.num_denoising_steps)
            running.append([steps, machine.step_seconds(tokens) - machine.step_seconds(0), arrival])
        latencies += [now - one[2] for one in running if one[0] <= 1e-9]
        running = [one for one in running if one[0] > 1e-9]
    return latencies
