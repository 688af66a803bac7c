"""TemplateRegistry: the registered templates together with their cached pages, which go when no template wants them."""

from __future__ import annotations

from collections import Counter

from core.messages.engine import DropTemplate
from core.model_choice import kin
from engine.client.served_models import ServedModels
from engine.client.template_store import Pages, Template, TemplateStore
from engine.router.router import Router


class TemplateRegistry:
    """store: the templates. Pages are wanted while a template of the store has them, or a registration that runs has
    claimed them.
    """

    def __init__(self, store: TemplateStore, served: ServedModels, router: Router) -> None:
        self.store = store
        self._served = served
        self._router = router
        self._claims: Counter[Pages] = Counter()  # pages -> registrations that run and will keep them

    def add(self, template: Template) -> None:
        """Register a template; what it displaces goes with its pages."""
        for gone in self.store.add(template):
            self._drop_all(gone)

    def remove(self, template_id: str, owner: str) -> None:
        """Forget a template and its pages. Raises TemplateNotFoundError."""
        self._drop_all(self.store.remove(template_id, owner))

    def claim(self, pages: Pages) -> None:
        """These pages are being made for a template that is registered afterwards."""
        self._claims[pages] += 1

    def release(self, pages: Pages) -> None:
        """End a claim."""
        self._claims[pages] -= 1
        if not self._claims[pages]:
            del self._claims[pages]

    def drop_unwanted(self, pages: Pages) -> None:
        """Have all engines forget pages unless they are wanted. An empty content id is of a template that never was
        prepared, and has none.
        """
        model, content_id, cache_salt = pages
        has_pages = content_id and self._served.by_name[model].page_scheme is not None
        if has_pages and pages not in self._claims and not self.store.holds_content(model, content_id, cache_salt):
            self._router.drop(DropTemplate(model, content_id, cache_salt))

    def _drop_all(self, gone: Template) -> None:
        """Those of edits with other adapters as well."""
        for model in kin(self._served.by_name, gone.model):
            for content_id in gone.content_ids:
                self.drop_unwanted((model, content_id, gone.cache_salt))
