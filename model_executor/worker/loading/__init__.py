"""Loads and drops components and adapters beside a worker's batches."""
