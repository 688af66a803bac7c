"""Training of the embedded model's edge ControlNet. The server does not need it."""
