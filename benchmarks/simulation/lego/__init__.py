"""LegoDiffusion's evaluation (section 7) in simulated time: `make simulate ARGS="--paper lego"`."""
