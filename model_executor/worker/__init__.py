"""The worker process: its loop over plans, the models it has loaded, and what it measures at start-up."""
