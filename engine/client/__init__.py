"""The API server's side of the engine: admission, preparation, submission and delivery of edits."""
