"""TemplateRegistry: the registered templates with their cached pages, which are dropped with the last template."""

from __future__ import annotations

from collections import Counter

from core.messages.engine import DropTemplate
from engine.client.recall.kept_states import KeptStates
from engine.client.resolve.served_models import ServedModels
from engine.client.templates.template_store import Pages, RegisteredTemplate, TemplateStore
from engine.router.router import Router


class TemplateRegistry:
    """store: the templates. Their pages are kept while a template in the store has them, or a registration in progress
    has claimed them.
    """

    def __init__(self, store: TemplateStore, served: ServedModels, router: Router, states: KeptStates) -> None:
        self.store = store
        self._states = states
        self._served = served
        self._router = router
        self._claims: Counter[Pages] = Counter()  # pages -> registrations in progress that claim them

    def add(self, template: RegisteredTemplate) -> None:
        """Register a template. Templates that it evicts lose their pages."""
        for evicted in self.store.add(template):
            self._drop_all(evicted)

    def remove(self, template_id: str, owner: str) -> None:
        """Delete a template and its pages. Raises TemplateNotFoundError."""
        self._drop_all(self.store.remove(template_id, owner))

    def claim(self, pages: Pages) -> None:
        """Keep these pages, which are primed for a template that will be registered."""
        self._claims[pages] += 1

    def release(self, pages: Pages) -> None:
        """End a claim."""
        self._claims[pages] -= 1
        if not self._claims[pages]:
            del self._claims[pages]

    def drop_unwanted(self, pages: Pages) -> None:
        """Have all engines drop pages that no template has and no registration claims, and forget the states of their
        picture's edits. An empty content id belongs to a template that was never prepared, and has no pages.
        """
        model, content_id, cache_salt = pages
        if not content_id or pages in self._claims or self.store.holds_content(model, content_id, cache_salt):
            return
        self._states.drop(model, content_id, cache_salt)
        if self._served.by_name[model].page_scheme is not None:
            self._router.drop(DropTemplate(model, content_id, cache_salt))

    def _drop_all(self, template: RegisteredTemplate) -> None:
        """Drop all pages of a template, those of edits with other adapters included."""
        for content_id in template.content_ids:
            self.drop_unwanted((template.model, content_id, template.cache_salt))
