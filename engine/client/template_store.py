"""The templates that clients have registered: encoded uploads by id, under a byte budget, with LRU.

Knows who owns what. What becomes of their pages is the caller's business: it is told which templates had to go.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field, replace

from core.errors import InvalidRequestError, TemplateNotFoundError
from engine.client.upload import KeptUpload

MAX_CROPS = 1000
"""Crops of one template that are remembered, so that their pages go with it; of more, the latest."""


Pages = tuple[str, str, str]
"""A template's pages: its model, its content id, its cache salt."""


def _new_id() -> str:
    return f"tmpl_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One registered image. owner: digest of the API key it came with, "" without keys. width, height: the upload's own
    pixels. image_tokens: at its generation size. content_id: see PreparedImages; "" until it was prepared. crops:
    content ids of parts of it that were edited by themselves, the latest last. created: Unix seconds. primed: its pages
    were computed, and took `page_bytes`. is_captured: a picture that the engine painted, which no edit has named yet.
    cache_salt: of its pages, see `CacheConfig.salt`.
    """

    upload: KeptUpload
    owner: str
    model: str
    width: int
    height: int
    image_tokens: int
    created: int
    content_id: str = ""
    crops: tuple[str, ...] = ()
    primed: bool = False
    page_bytes: int = 0
    is_captured: bool = False
    cache_salt: str = ""
    id: str = field(default_factory=_new_id)

    @property
    def content_ids(self) -> tuple[str, ...]:
        """Of all that has pages, or may have."""
        return self.content_id, *self.crops


class TemplateStore:
    """Templates of all owners, `budget` bytes of uploads in all.

    Captured ones make room first, the oldest first, and never displace others: nobody asked for them. One that an edit
    names is from then on as one that was registered.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._templates: dict[str, Template] = {}  # id -> template, least recently used first
        self._captured: dict[str, int] = {}  # id -> size of those that are captured, oldest first
        self._captured_bytes = 0
        self._num_sharing: Counter[Pages] = Counter()  # whose pages -> templates that have them

    def __len__(self) -> int:
        return len(self._templates)

    def __contains__(self, template_id: str) -> bool:
        return template_id in self._templates

    def check_size(self, nbytes: int) -> None:
        """Raises InvalidRequestError for an upload that could not be kept."""
        if nbytes > self.budget:
            message = (
                f"Invalid 'image': {nbytes} bytes are more than the {self.budget} that the server keeps for templates"
            )
            remedy = "send a smaller file, or start the server with a larger --template-bytes"
            raise InvalidRequestError(f"{message}; {remedy}.", param="image", code="image_too_large")

    def add(self, template: Template) -> list[Template]:
        """Keep a new template; returns those that made room for it: a captured one itself, if only others could. Raises
        as `check_size`.
        """
        size = template.upload.size
        self.check_size(size)
        if template.is_captured and self.used_bytes - self._captured_bytes + size > self.budget:
            return [template]
        gone = []
        while self.used_bytes + size > self.budget:
            gone.append(self._take_out(next(iter(self._captured or self._templates))))
        self._put_in(template)
        return gone

    def get(self, template_id: str, owner: str) -> Template:
        """Raises TemplateNotFoundError for an id that is unknown or another's."""
        return self._find(template_id, owner, None)

    def use(self, template_id: str, owner: str) -> Template:
        """`get` for an edit's `template_id`: the template becomes the most recently used one."""
        template = self._find(template_id, owner, "template_id")
        self._captured_bytes -= self._captured.pop(template_id, 0)
        del self._templates[template_id]
        self._templates[template_id] = used = replace(template, is_captured=False)
        return used

    def remove(self, template_id: str, owner: str) -> Template:
        """Raises as `get`."""
        self._find(template_id, owner, None)
        return self._take_out(template_id)

    def set_content(self, template_id: str, content_id: str) -> None:
        """What is known once it was prepared; nothing happens to one that is gone."""
        template = self._templates.get(template_id)
        if template is not None and content_id != template.content_id:
            self._set(replace(template, content_id=content_id))

    def add_crop(self, template_id: str, content_id: str) -> None:
        """A part of it was prepared for an edit; nothing happens where that is known, or the template is gone."""
        template = self._templates.get(template_id)
        if template is not None and content_id not in template.crops:
            self._set(replace(template, crops=(*template.crops, content_id)[-MAX_CROPS:]))

    def set_primed(self, template_id: str, page_bytes: int) -> None:
        """What is known once it was primed; nothing happens to one that is gone."""
        if template_id in self._templates:
            self._templates[template_id] = replace(self._templates[template_id], primed=True, page_bytes=page_bytes)

    def holds_content(self, model: str, content_id: str, cache_salt: str = "") -> bool:
        """Whether any template has these pages."""
        return (model, content_id, cache_salt) in self._num_sharing

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books agree with the templates."""
        templates = self._templates.values()
        assert self.used_bytes == sum(template.upload.size for template in templates) <= self.budget
        assert self._num_sharing == Counter(content for template in templates for content in _contents(template))
        assert all(template_id == template.id for template_id, template in self._templates.items())
        assert self._captured == {template.id: template.upload.size for template in templates if template.is_captured}
        assert self._captured_bytes == sum(self._captured.values())

    def _find(self, template_id: str, owner: str, param: str | None) -> Template:
        template = self._templates.get(template_id)
        if template is None or template.owner != owner:
            raise TemplateNotFoundError(template_id, param=param)
        return template

    def _put_in(self, template: Template) -> None:
        size = template.upload.size
        self._templates[template.id] = template
        self.used_bytes += size
        if template.is_captured:
            self._captured[template.id] = size
            self._captured_bytes += size
        self._num_sharing.update(_contents(template))

    def _take_out(self, template_id: str) -> Template:
        template = self._templates.pop(template_id)
        self.used_bytes -= template.upload.size
        self._captured_bytes -= self._captured.pop(template_id, 0)
        self._forget_contents(template)
        return template

    def _set(self, template: Template) -> None:
        """Replace one that is there by itself with other contents."""
        self._forget_contents(self._templates[template.id])
        self._templates[template.id] = template
        self._num_sharing.update(_contents(template))

    def _forget_contents(self, template: Template) -> None:
        for content in _contents(template):
            self._num_sharing[content] -= 1
            if not self._num_sharing[content]:
                del self._num_sharing[content]


def _contents(template: Template) -> list[Pages]:
    return [(template.model, content_id, template.cache_salt) for content_id in template.content_ids]
