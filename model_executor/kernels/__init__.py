"""The operators that models compute with, for CPUs and GPUs: products, attention, page reading."""
