"""Starts the launcher of workers before the server imports what it needs itself: the launcher imports PyTorch, which
takes longest of all, and does so beside that.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from core.ipc import logs
from engine.client.processes.worker_launcher import needs_launcher, worker_launcher
from entrypoints.serve_args import parse_options
from entrypoints.serve_options import ServeOptions

launched = ExitStack()
"""To be closed at the end of the process."""


def launch_early() -> ServeOptions:
    """Start it if the flags of this process ask for workers that it forks. Returns the flags' options, as some files
    that flags name, such as pipes, can be read only once. Exits as `parse_options` for bad flags."""
    options = parse_options(None)
    configure_logging(options)  # which it inherits
    if needs_launcher(options.config.engine):
        launched.enter_context(worker_launcher.used())
    return options


def configure_logging(options: ServeOptions) -> None:
    """Log as the flags say."""
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    logs.configure(logs.LogConfig(level, options.log_format), "stencil")
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if level == logging.DEBUG else logging.WARNING)
