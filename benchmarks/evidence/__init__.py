"""`make bench`: every claim measured in one sweep, kept as JSON files, and written up as docs/benchmarks.md."""
