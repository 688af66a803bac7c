"""TemplateIndex: the entries of the activation cache by template, and the templates that have changed."""

from __future__ import annotations

from collections.abc import Iterable

from core.page_scheme import template_of, unpatched


class TemplateIndex:
    """Owned by one cache manager, which reports every entry that comes or goes."""

    def __init__(self) -> None:
        self._keys: dict[str, set[str]] = {}  # template key -> keys of its entries
        self._related: dict[str, set[str]] = {}  # template key without patches -> those of all its patch sets
        self._moved: set[str] = set()  # keys of templates

    def add(self, key: str) -> None:
        template_key = template_of(key)
        self._keys.setdefault(template_key, set()).add(key)
        self._related.setdefault(unpatched(key), set()).add(template_key)

    def remove(self, key: str) -> None:
        template_key = template_of(key)
        self._keys[template_key].remove(key)
        if not self._keys[template_key]:
            del self._keys[template_key]
            self._forget(template_key)

    def _forget(self, template_key: str) -> None:
        related = self._related[unpatched(template_key)]
        related.remove(template_key)
        if not related:
            del self._related[unpatched(template_key)]

    def keys_of(self, template_key: str) -> list[str]:
        """Keys of a template's entries, sorted."""
        return sorted(self._keys.get(template_key, ()))

    def keys_of_all(self, template_key: str) -> list[str]:
        """Keys of the entries of a template with any patch set. template_key: the key without patches."""
        return [key for related in sorted(self._related.get(template_key, ())) for key in self.keys_of(related)]

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
        assert {key for keys in self._related.values() for key in keys} == set(self._keys)
