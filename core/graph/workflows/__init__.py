"""The shipped workflows, one per file. `core.graph.catalog` lists them, and those that are made of them."""
