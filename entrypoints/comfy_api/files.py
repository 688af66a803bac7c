"""Files: what callers have uploaded, and the pictures that their prompts have made, by ComfyUI's names of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Literal, get_args

from core.errors import InvalidRequestError
from core.validation import shorten
from engine.client.upload import KeptUpload
from entrypoints.comfy_api.owned_store import OwnedStore, StoreLimits

Folder = Literal["input", "output", "temp"]
"""Uploads, pictures that are saved, and pictures that are only shown."""

FOLDERS: tuple[Folder, ...] = get_args(Folder)

LIMITS = StoreLimits(number=1000, nbytes=128 * 2**20, number_in_all=5000, nbytes_in_all=2**29)
"""Of uploads; as much again of the pictures that prompts make, so that these push no uploads out."""

MAX_NAME = 255
"""Most characters of a file's name, and of its subfolder."""


@dataclass(frozen=True, slots=True)
class FileName:
    """Where a file is."""

    name: str
    subfolder: str = ""  # without slashes at its ends
    folder: Folder = "output"

    @classmethod
    def of(cls, name: str, subfolder: str = "", folder: str = "output") -> FileName:
        """The name that a client gives, checked. Raises InvalidRequestError."""
        parts = [part for part in subfolder.split("/") if part not in ("", ".")]
        if folder not in FOLDERS:
            raise _wrong("type", folder, f"there are {', '.join(FOLDERS)}")
        for what, each in (("filename", name), *(("subfolder", part) for part in parts)):
            if each in ("", ".", "..") or not each.isprintable() or any(sign in each for sign in '/\\"'):
                raise _wrong(what, each, "a name has printable characters without slashes and quotes")
        if len(name) > MAX_NAME or len(subfolder) > MAX_NAME:
            raise _wrong("filename", name, f"it has more than {MAX_NAME} characters")
        return cls(name, "/".join(parts), next(known for known in FOLDERS if known == folder))

    @classmethod
    def of_input(cls, text: str) -> FileName:
        """The file that a node loads: ``subfolder/name``, or with the folder at the end, ``name [output]``. Raises
        InvalidRequestError.
        """
        folder = next((each for each in FOLDERS if text.endswith(f" [{each}]")), "")
        path = text.removesuffix(f" [{folder}]") if folder else text
        subfolder, _, name = path.rpartition("/")
        return cls.of(name, subfolder, folder or "input")

    @property
    def shown(self) -> dict[str, str]:
        """As answers show it."""
        return {"filename": self.name, "subfolder": self.subfolder, "type": self.folder}


def _wrong(name: str, value: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': {shorten(value)!r}: {why}.", param=name)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A picture. It is memory alone: nothing need be closed."""

    content: KeptUpload
    mask: StoredFile | None = None  # whose transparency is its mask, instead of its own

    @property
    def size(self) -> int:
        """Bytes."""
        return self.content.size

    def chunks(self) -> AsyncIterator[bytes]:
        """The content, in pieces."""
        return self.content.chunks()

    def close(self) -> None:
        """Others may use it still."""

    def is_like(self, other: StoredFile) -> bool:
        """Whether both are pictures of the same content, without masks of their own."""
        return (self.mask, other.mask) == (None, None) and self.content.is_like(other.content)


class Files:
    """Of all owners. Files that a prompt reads stay as long as it runs; of the others, those go first that were not
    read for the longest time.
    """

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self._uploads: OwnedStore[FileName, StoredFile] = OwnedStore(limits)
        self._made: OwnedStore[FileName, StoredFile] = OwnedStore(limits)
        self._counters: dict[str, count[int]] = {}  # owner -> numbers of pictures that are made

    def put(self, owner: str, name: FileName, file: StoredFile) -> bool:
        """Keep a file in place of the one of this name. False: it is too large."""
        return self._store_of(name).put(owner, name, file, file.size + (file.mask.size if file.mask else 0))

    def find(self, owner: str, name: FileName) -> StoredFile | None:
        """An owner's file; None: there is none, or none any more."""
        return self._store_of(name).use(owner, name)

    def _store_of(self, name: FileName) -> OwnedStore[FileName, StoredFile]:
        return self._uploads if name.folder == "input" else self._made

    def inputs(self, owner: str) -> list[str]:
        """An owner's uploads, as nodes load them."""
        names = (name for name, _ in self._uploads.of(owner))
        return sorted(f"{name.subfolder}/{name.name}" if name.subfolder else name.name for name in names)

    def new_name(self, owner: str, prefix: str, folder: Folder) -> FileName:
        """A name that no picture of the owner has had. prefix: of the name, which may have subfolders before it. Raises
        InvalidRequestError.
        """
        subfolder, _, stem = prefix.rpartition("/")
        number = next(self._counters.setdefault(owner, count(1)))
        return FileName.of(f"{stem}_{number:05}_.png", subfolder, folder)

    def free_name(self, owner: str, wanted: FileName, file: StoredFile) -> FileName:
        """The name, or where another file has it, the first one like it that is free or that this very file has. Raises
        InvalidRequestError where that is too long.
        """
        stem, dot, ending = wanted.name.rpartition(".") if "." in wanted.name else (wanted.name, "", "")
        like_it = (
            FileName.of(f"{stem} ({number}){dot}{ending}", wanted.subfolder, wanted.folder) for number in count(1)
        )
        for name in chain((wanted,), like_it):
            known = self._store_of(name).get(owner, name)
            if known is None or known.is_like(file):
                return name
        raise AssertionError("numbers do not end")


SIGNS = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"))


def media_type(head: bytes) -> str:
    """The type of a picture by its first 12 bytes; "": it is none of those that are read."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((name for sign, name in SIGNS if head.startswith(sign)), "")
