"""First code of a child process, run by path as `python -P bootstrap.py NAME FD` by `core.ipc.process.spawn`.

FD holds one line of JSON, `path` and what `process.run_child` reads, and then the config's bytes. Nothing of the
project can be imported before the parent's `sys.path` is in place.
"""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """Take over the parent's module path, then run the target."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group, and are the parent's to act on
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # spawn blocked them until here
    with open(int(sys.argv[2]), "rb") as file:
        header = json.loads(file.readline())
        config = file.read()
    sys.path[:] = header["path"]
    from core.ipc import process

    process.run_child(sys.argv[1], header, config)


if __name__ == "__main__":
    main()
