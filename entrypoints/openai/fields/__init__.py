"""The fields of requests: one table, from which parsing and the OpenAPI document derive."""
