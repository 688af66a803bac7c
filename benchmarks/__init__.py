"""Measurements of the whole product, by its own command line and HTTP API. Each ends with one line of JSON."""
