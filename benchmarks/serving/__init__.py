"""The parts of `benchmark_serving`: what is sent, when, by whom, and what came of it."""
