"""A fleet of engines in simulated time: the code that decides is the real one, only workers are simulated."""
