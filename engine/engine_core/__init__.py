"""The process that schedules: its loop, its socket and its watchdogs."""
