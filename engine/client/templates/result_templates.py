"""ResultTemplates: registers finished results as templates, so that an edit of a result finds its pages cached.

The pages are primed from the finished picture, not taken from the run that made it: that run's keys and values depend
on its prompt, its mask and its noise. Primed pages are a function of the picture alone, so an edit of it is the same
whether it was captured or not.
"""

from __future__ import annotations

import logging
import time

from core.errors import StencilError
from core.messages.image_processor import ComposedImage
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from engine.client.resolve.mask_aware import can_prime_ahead
from engine.client.services import Services
from engine.client.sessions.template_session import TemplateSession
from engine.client.templates.template_store import RegisteredTemplate
from engine.client.upload import KeptUpload
from engine.images.image_ops import generation_size

logger = logging.getLogger("stencil.engine")

MAX_IN_FLIGHT = 4
"""Results that may wait for idle time at once, as each occupies shared memory. Further ones become templates too, and
are primed by the first edit that uses them."""


class ResultTemplates:
    """Registers finished pictures and primes them in the background, while no edit is to be computed."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._num_in_flight = 0  # background tasks that run

    async def keep(self, image: ComposedImage, choice: ModelChoice, owner: str, *, is_base64: bool) -> str | None:
        """Register `image`; returns the template's id, or None if the server's flags leave no use or no room for it.
        choice: that made it, and for which it is primed."""
        model = choice.model
        num_tokens = _num_tokens(image, model)
        if not self._is_useful(model, num_tokens) or not self._is_readable(image):
            return None
        upload = await KeptUpload.of_output(self._services.arena.view(image.encoded).data, is_base64=is_base64)
        limits = self._services.config.image
        if upload.size > min(self._services.templates.store.budget, limits.max_upload_bytes):
            logger.debug("a picture of %d bytes is larger than a template may be: not captured", upload.size)
            return None
        template = RegisteredTemplate(
            upload=upload,
            owner=owner,
            model=model.name,
            width=image.width,
            height=image.height,
            image_tokens=num_tokens,
            created=int(time.time()),
            is_captured=True,
            cache_salt=self._services.served.cache.salt(owner),
        )
        self._services.templates.add(template)
        if template.id not in self._services.templates.store:
            logger.debug("registered templates take up --template-bytes: a picture was not captured")
            return None
        if self._num_in_flight < MAX_IN_FLIGHT:
            self._num_in_flight += 1
            self._services.sessions.run_in_background(self._prime(template, choice))
        return template.id

    def _is_useful(self, model: ModelInfo, num_tokens: int) -> bool:
        cache, num_ranks = self._services.served.cache, self._services.config.engine.workers_per_engine
        return cache.admission == "always" and can_prime_ahead(model, cache, num_ranks, num_tokens)

    def _is_readable(self, image: ComposedImage) -> bool:
        """Whether an edit could decode it: with `size` a result may be larger than any upload may be."""
        return image.width * image.height <= self._services.config.image.max_pixels

    async def _prime(self, template: RegisteredTemplate, choice: ModelChoice) -> None:
        """Prime a template in idle time. A failure is only logged: the first edit of the template primes it then."""
        name, upload, owner = f"capture-{template.id}", template.upload, template.owner
        session = TemplateSession(self._services, name, upload, choice, owner=owner, is_idle_work=True)
        try:
            with self._services.sessions.track(session):
                await self._prime_session(session, template)
        except StencilError as error:
            level = logging.DEBUG if self._services.sessions.is_closing else logging.WARNING
            logger.log(level, "template %s was not primed: %s", template.id, error)
        finally:
            self._num_in_flight -= 1

    async def _prime_session(self, session: TemplateSession, template: RegisteredTemplate) -> None:
        templates = self._services.templates.store
        content_id = (await session.prepare()).content_id
        templates.set_content(template.id, content_id)
        if template.id not in templates or self._services.sessions.is_closing:
            return
        templates.set_primed(template.id, (await session.prime()).nbytes)


def _num_tokens(image: ComposedImage, model: ModelInfo) -> int:
    """Image tokens of the picture if it were uploaded."""
    width, height = generation_size(image.width, image.height, model.native_size, model.token_size, model.max_side)
    return model.num_image_tokens(width, height)
