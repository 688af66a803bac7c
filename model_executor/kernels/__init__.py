"""The operators that models are computed with: products, attention, page reading; for CPUs and GPUs."""
