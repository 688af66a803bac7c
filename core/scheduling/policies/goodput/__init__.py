"""The policy goodput: as many requests as possible meet their latency objective."""
