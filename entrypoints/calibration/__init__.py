"""The parts of `python -m entrypoints.calibrate`, which chooses mask-aware execution's settings for a checkpoint."""
