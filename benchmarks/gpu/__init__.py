"""What a GPU machine shows of Stencil in ten minutes: correctness, speed against diffusers, and its bars."""
