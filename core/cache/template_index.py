"""TemplateIndex: the entries of the activation cache by template, and the templates that have changed."""

from __future__ import annotations

from collections.abc import Iterable

from core.page_scheme import template_of


class TemplateIndex:
    """Owned by one cache manager, which reports every entry that comes or goes."""

    def __init__(self) -> None:
        self._keys: dict[str, set[str]] = {}  # template key -> keys of its entries
        self._moved: set[str] = set()  # keys of templates

    def add(self, key: str) -> None:
        self._keys.setdefault(template_of(key), set()).add(key)

    def remove(self, key: str) -> None:
        template_key = template_of(key)
        self._keys[template_key].remove(key)
        if not self._keys[template_key]:
            del self._keys[template_key]

    def keys_of(self, template_key: str) -> list[str]:
        """Keys of a template's entries, sorted."""
        return sorted(self._keys.get(template_key, ()))

    def note_moved(self, key: str) -> None:
        """Note that an entry's pages have come to a tier or left it."""
        self._moved.add(template_of(key))

    def take_moved(self) -> list[str]:
        """Keys of the templates that have changed since the last call, sorted."""
        moved, self._moved = self._moved, set()
        return sorted(moved)

    def check_integrity(self, keys: Iterable[str]) -> None:
        """Raise AssertionError unless it contains exactly these entries."""
        assert {key for keys in self._keys.values() for key in keys} == set(keys)
        assert all(self._keys.values()), "a template without entries"
