"""How `python -m entrypoints.calibrate` chooses the settings of mask-aware execution for a checkpoint."""
