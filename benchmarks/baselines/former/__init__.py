"""The policies step_batching, goodput and elastic as they were before the policy `default` replaced them, with all that
they stood on. They are kept unchanged for as long as the arena (`benchmarks/simulation/arena`) compares with them.
"""
