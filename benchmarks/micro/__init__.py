"""One piece at a time: a step, a kernel, a decision."""
