"""TemplateStore: registered templates (encoded uploads) by id, under a byte budget, evicted least recently used first.

It checks owners, and knows nothing of pages: `add` returns the evicted templates, and the caller drops their pages.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field, replace

from core.errors import InvalidRequestError, TemplateNotFoundError
from engine.client.upload import KeptUpload

MAX_VIEWS = 1000
"""Views remembered per template, the latest ones, so that their pages are dropped with it."""


Pages = tuple[str, str, str]
"""Identifies a template's pages: model, content id, cache salt."""


def _new_id() -> str:
    return f"tmpl_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTemplate:
    """One registered image. owner: digest of its API key, "" without keys. width, height: pixels of the upload.
    image_tokens: at its generation size. content_id: see PreparedImages; "" before preparation. views: content ids of
    edits of a part of it (`padding_mask_crop`), or with references, the latest last. created: Unix seconds. primed: its
    pages were computed and take `page_bytes`. is_captured: a result that was registered automatically and not used by
    an edit yet. cache_salt: of its pages, see `CacheConfig.salt`.
    """

    upload: KeptUpload
    owner: str
    model: str
    width: int
    height: int
    image_tokens: int
    created: int
    content_id: str = ""
    views: tuple[str, ...] = ()
    primed: bool = False
    page_bytes: int = 0
    is_captured: bool = False
    cache_salt: str = ""
    id: str = field(default_factory=_new_id)

    @property
    def content_ids(self) -> tuple[str, ...]:
        """Content ids of the whole and its views, all of which may have pages."""
        return self.content_id, *self.views


class TemplateStore:
    """Templates of all owners, at most `budget` bytes of uploads in total.

    Captured ones are evicted first, oldest first, and never evict others, as no client asked for them. Once an edit
    names one, it counts as registered by its client.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._templates: dict[str, RegisteredTemplate] = {}  # id -> template, least recently used first
        self._captured: dict[str, int] = {}  # id -> bytes of captured templates, oldest first
        self._captured_bytes = 0
        self._num_sharing: Counter[Pages] = Counter()  # pages -> number of templates that have them

    def __len__(self) -> int:
        return len(self._templates)

    def __contains__(self, template_id: str) -> bool:
        return template_id in self._templates

    def check_size(self, nbytes: int) -> None:
        """Raises InvalidRequestError for an upload larger than the budget."""
        if nbytes > self.budget:
            message = (
                f"Invalid 'image': {nbytes} bytes are more than the {self.budget} that the server keeps for templates"
            )
            remedy = "send a smaller file, or start the server with a larger --template-bytes"
            raise InvalidRequestError(f"{message}; {remedy}.", param="image", code="image_too_large")

    def add(self, template: RegisteredTemplate) -> list[RegisteredTemplate]:
        """Add a template; returns the evicted ones. A captured one that would evict registered ones is not added and is
        returned itself. Raises as `check_size`.
        """
        size = template.upload.size
        self.check_size(size)
        if template.is_captured and self.used_bytes - self._captured_bytes + size > self.budget:
            return [template]
        evicted = []
        while self.used_bytes + size > self.budget:
            evicted.append(self._take_out(next(iter(self._captured or self._templates))))
        self._put_in(template)
        return evicted

    def get(self, template_id: str, owner: str) -> RegisteredTemplate:
        """Raises TemplateNotFoundError for an id that is unknown or belongs to another owner."""
        return self._find(template_id, owner, None)

    def use(self, template_id: str, owner: str) -> RegisteredTemplate:
        """As `get`, for an edit's `template_id`; the template becomes the most recently used one."""
        template = self._find(template_id, owner, "template_id")
        self._captured_bytes -= self._captured.pop(template_id, 0)
        del self._templates[template_id]
        self._templates[template_id] = used = replace(template, is_captured=False)
        return used

    def remove(self, template_id: str, owner: str) -> RegisteredTemplate:
        """Remove and return a template. Raises as `get`."""
        self._find(template_id, owner, None)
        return self._take_out(template_id)

    def set_content(self, template_id: str, content_id: str) -> None:
        """Set the content id, known after preparation; no effect if the template was removed."""
        template = self._templates.get(template_id)
        if template is not None and content_id != template.content_id:
            self._set(replace(template, content_id=content_id))

    def add_view(self, template_id: str, content_id: str) -> None:
        """Note the content id of an edit of a part of it, or with references; no effect if it is known, or the template
        was removed."""
        template = self._templates.get(template_id)
        if template is not None and content_id not in template.views:
            self._set(replace(template, views=(*template.views, content_id)[-MAX_VIEWS:]))

    def set_primed(self, template_id: str, page_bytes: int) -> None:
        """Mark a template as primed; no effect if it was removed."""
        if template_id in self._templates:
            self._templates[template_id] = replace(self._templates[template_id], primed=True, page_bytes=page_bytes)

    def holds_content(self, model: str, content_id: str, cache_salt: str = "") -> bool:
        """Whether any template has these pages."""
        return (model, content_id, cache_salt) in self._num_sharing

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree with the templates."""
        templates = self._templates.values()
        assert self.used_bytes == sum(template.upload.size for template in templates) <= self.budget
        assert self._num_sharing == Counter(content for template in templates for content in _contents(template))
        assert all(template_id == template.id for template_id, template in self._templates.items())
        assert self._captured == {template.id: template.upload.size for template in templates if template.is_captured}
        assert self._captured_bytes == sum(self._captured.values())

    def _find(self, template_id: str, owner: str, param: str | None) -> RegisteredTemplate:
        template = self._templates.get(template_id)
        if template is None or template.owner != owner:
            raise TemplateNotFoundError(template_id, param=param)
        return template

    def _put_in(self, template: RegisteredTemplate) -> None:
        size = template.upload.size
        self._templates[template.id] = template
        self.used_bytes += size
        if template.is_captured:
            self._captured[template.id] = size
            self._captured_bytes += size
        self._num_sharing.update(_contents(template))

    def _take_out(self, template_id: str) -> RegisteredTemplate:
        template = self._templates.pop(template_id)
        self.used_bytes -= template.upload.size
        self._captured_bytes -= self._captured.pop(template_id, 0)
        self._forget_contents(template)
        return template

    def _set(self, template: RegisteredTemplate) -> None:
        """Replace a template by a copy with other content ids."""
        self._forget_contents(self._templates[template.id])
        self._templates[template.id] = template
        self._num_sharing.update(_contents(template))

    def _forget_contents(self, template: RegisteredTemplate) -> None:
        for content in _contents(template):
            self._num_sharing[content] -= 1
            if not self._num_sharing[content]:
                del self._num_sharing[content]


def _contents(template: RegisteredTemplate) -> list[Pages]:
    return [(template.model, content_id, template.cache_salt) for content_id in template.content_ids]
