"""Building blocks for several processes: shared arrays, rings, child processes, logging. Imports only `core`."""
