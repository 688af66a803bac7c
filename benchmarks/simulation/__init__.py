"""A fleet of engines in simulated time: everything that decides is the real thing, only the workers are made up."""
