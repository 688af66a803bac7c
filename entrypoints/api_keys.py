"""Where API keys come from: the command line, files, the environment. No message holds a key."""

from __future__ import annotations

import os
import stat
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ConfigError

KEY_VARIABLE = "STENCIL_API_KEY"
KEYS_VARIABLE = "STENCIL_API_KEYS"
BYTE_ORDER_MARK = "\ufeff"  # some editors begin UTF-8 files with it
_BLANKS = string.whitespace + BYTE_ORDER_MARK


@dataclass(frozen=True)
class KeySource:
    """What a command line and its environment say of keys, to be read at the start and whenever files change."""

    flags: Sequence[str] = field(repr=False)
    files: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)

    def read(self) -> tuple[str, ...]:
        """All keys, each once: those of flags and files, or without any of these the environment's; none: no key is
        asked for. Raises ConfigError, also where keys were promised and there is none: the server would be open.
        """
        keys = [_flag_key(flag) for flag in self.flags]
        keys += [key for file in self.files for key in read_key_file(Path(file))]
        return tuple(dict.fromkeys(keys or _environment_keys(self.environment)))


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
            lines = [line.strip(_BLANKS) for line in file]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {path} is not UTF-8 text") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not numbered:
        raise ConfigError(f"the key file {path} holds no key")
    return [_checked(line, f"line {number} of the key file {path}") for number, line in numbered]


def _flag_key(flag: str) -> str:
    key = flag.strip(_BLANKS)
    if not key:
        raise ConfigError("--api-key is empty; leave it out to ask for no key")
    return _checked(key, "--api-key")


def _environment_keys(environment: Mapping[str, str]) -> list[str]:
    """A variable that is set is a promise of keys, whatever the other one holds."""
    keys = []
    for name, separator in ((KEY_VARIABLE, None), (KEYS_VARIABLE, ",")):
        if (text := environment.get(name)) is not None:
            parts = text.split(separator) if separator else [text]
            found = [key for part in parts if (key := part.strip(_BLANKS))]
            if not found:
                raise ConfigError(f"{name} is set and holds no key; unset it to ask for none")
            keys += [_checked(key, name) for key in found]
    return keys


def _checked(key: str, source: str) -> str:
    """Raises ConfigError for a key that would never match what clients send, without showing it."""
    if not key.isprintable():
        raise ConfigError(
            f"{source} holds a character that cannot be seen, which no client would send; "
            "keys are printable text, files of keys are UTF-8"
        )
    return key
