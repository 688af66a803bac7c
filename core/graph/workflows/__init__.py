"""The shipped workflows, one per file. `core.graph.catalog` lists them."""
