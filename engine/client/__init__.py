"""The part of the engine that runs in the API server: admission, preparation, submission and delivery of edits."""
