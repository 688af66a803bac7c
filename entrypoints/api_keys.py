"""Reads API keys from the command line, from files and from the environment. Error messages never contain a key."""

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
    """The configured places of keys. Read at the start, and again on SIGHUP because files may have changed."""

    flags: Sequence[str] = field(repr=False)
    files: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)

    def read(self) -> tuple[str, ...]:
        """The keys of flags and files, or if there are none, of the environment; without duplicates. Empty: no key is
        required. Raises ConfigError for a bad key, and for a file or variable without keys: the server would be open.
        """
        keys = [_flag_key(flag) for flag in self.flags]
        keys += [key for file in self.files for key in read_key_file(Path(file))]
        return tuple(dict.fromkeys(keys or _environment_keys(self.environment)))


def read_key_file(path: Path) -> list[str]:
    """The keys in a file: one per line, lines that begin with # are comments. Raises ConfigError.

    As ssh does with private keys, refuses a file of this user that other users may access, since they may have read it
    already. Files of other owners, such as secrets mounted into a container, are not checked.
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
    """Raises ConfigError if either variable is set but contains no key, even if the other one has some."""
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
    """`key`, if a client can send it. Raises ConfigError, which does not show the key, if it is not printable."""
    if not key.isprintable():
        raise ConfigError(
            f"{source} holds a character that cannot be seen, which no client would send; "
            "keys are printable text, files of keys are UTF-8"
        )
    return key
