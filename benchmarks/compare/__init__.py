"""This tree against another commit: are the pictures the same, and is it as fast? `make compare REF=<commit>`."""
