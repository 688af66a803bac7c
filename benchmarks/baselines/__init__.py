"""What a user would pick instead of Stencil, behind the same HTTP, so that `benchmark_serving` measures all alike."""
