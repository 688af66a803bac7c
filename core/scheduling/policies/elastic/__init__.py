"""The policy elastic: the number of ranks of each request changes between its steps."""
