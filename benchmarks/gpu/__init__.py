"""A check of Stencil on a GPU machine in ten minutes: correctness, speed against diffusers, and bars."""
