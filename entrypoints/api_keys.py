"""Where API keys come from: the command line, files, the environment. No message holds a key."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.errors import ConfigError

KEY_VARIABLE = "STENCIL_API_KEY"
KEYS_VARIABLE = "STENCIL_API_KEYS"


def find_keys(flags: Sequence[str], files: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """All keys, each once: those of flags and files, or without any of these the environment's; none: no key is asked
    for. Raises ConfigError, also where keys were promised and there is none: the server would be open.
    """
    if any(not key.strip() for key in flags):
        raise ConfigError("--api-key is empty; leave it out to ask for no key")
    keys = [*flags, *(key for file in files for key in read_key_file(Path(file)))]
    return tuple(dict.fromkeys(key.strip() for key in keys or _environment_keys(environment)))


def _environment_keys(environment: Mapping[str, str]) -> list[str]:
    one, several = environment.get(KEY_VARIABLE, ""), environment.get(KEYS_VARIABLE, "")
    keys = [key for key in (one, *several.split(",")) if key.strip()]
    if several and not keys:
        raise ConfigError(f"{KEYS_VARIABLE} holds no key; unset it to ask for none")
    return keys


def read_key_file(path: Path) -> list[str]:
    """The keys of a file, one a line, without comment lines. Raises ConfigError.

    As ssh does with private keys, a file of our own that others may read is refused, since they may have read it
    already; another owner's file is that owner's matter, such as a secret that a container has mounted.
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"others may use the key file {path} (mode {mode:04o}); run: chmod 600 {path}")
            lines = [line.strip() for line in file]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {path} is not UTF-8 text") from error
    if not (keys := [line for line in lines if line and not line.startswith("#")]):
        raise ConfigError(f"the key file {path} holds no key")
    return keys
