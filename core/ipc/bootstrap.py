"""Entry point of a child process, run by path as `python -P bootstrap.py NAME FD` by `core.ipc.process.spawn`.

FD contains one line of JSON, `path` and the header of `process.run_child`, followed by the config's bytes. The project
cannot be imported before the parent's `sys.path` is in place.
"""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """Set the parent's module path, then run the target."""
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to the whole process group, but handled by the parent
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
