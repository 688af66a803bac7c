"""Model families: what an op of a workflow does in each."""
