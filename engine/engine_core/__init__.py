"""The engine process: its loop (EngineCore), its socket and its watchdogs."""
