"""The load generator: datasets, arrivals, the client, servers, and summaries of runs."""
