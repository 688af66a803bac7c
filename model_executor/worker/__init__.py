"""A worker's process: the loop over plans, the models it holds, and what it measures at start."""
