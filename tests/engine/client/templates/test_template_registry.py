"""Which templates' pages engines drop: those that no template and no running registration has any more."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL

from core.config import EngineConfig
from core.messages.engine import DropTemplate
from core.model_info import ModelInfo
from core.page_scheme import PageLayout, PageScheme
from engine.client.recall.kept_states import KeptStates
from engine.client.resolve.served_models import ServedModels
from engine.client.sessions.client_arena import ClientArena
from engine.client.templates.template_registry import TemplateRegistry
from engine.client.templates.template_store import RegisteredTemplate, TemplateStore
from engine.client.upload import KeptUpload

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=2, num_heads=2, head_dim=16, dtype="int8"),
    keyframes=(1.0, 0.5, 0.0),
    latent_bytes=256,
    fingerprint="f",
    guidance_scale=30.0,
    mask_margin=8,
    full_steps=1,
    full_steps_of=8,
    full_steps_from=0.25,
)
AWARE = msgspec.structs.replace(MODEL, page_scheme=SCHEME)


class Engines:
    """Records which pages are dropped, in place of a router."""

    def __init__(self) -> None:
        self.dropped: list[tuple[str, str, str]] = []

    def drop(self, template: DropTemplate) -> None:
        self.dropped.append((template.model, template.content_id, template.cache_salt))


@pytest.fixture
def engines() -> Engines:
    return Engines()


def make_registry(engines: Engines, *models: ModelInfo, budget: int = 20) -> TemplateRegistry:
    config = EngineConfig()
    served = ServedModels(config)
    served.set({model.name: model for model in models}, config)
    states = KeptStates(0, ClientArena(1))
    return TemplateRegistry(TemplateStore(budget), served, engines, states)  # type: ignore[arg-type]


def template(content_id: str = "c", views: tuple[str, ...] = (), model: str = "m") -> RegisteredTemplate:
    return RegisteredTemplate(
        upload=KeptUpload([b"x" * 10]),
        owner="me",
        model=model,
        width=16,
        height=16,
        image_tokens=1,
        created=0,
        content_id=content_id,
        views=views,
    )


def test_a_deleted_template_takes_its_pages_and_those_of_its_crops_along(engines: Engines) -> None:
    registry, mine = make_registry(engines, AWARE), template(views=("crop",))
    registry.add(mine)
    registry.remove(mine.id, "me")
    assert sorted(engines.dropped) == [("m", "c", ""), ("m", "crop", "")]


def test_a_displaced_template_takes_its_pages_along(engines: Engines) -> None:
    registry = make_registry(engines, AWARE)
    for content_id in "abc":
        registry.add(template(content_id))
    assert engines.dropped == [("m", "a", "")]


def test_pages_that_another_template_has_stay(engines: Engines) -> None:
    registry, first = make_registry(engines, AWARE), template()
    registry.add(first)
    registry.add(template())
    registry.remove(first.id, "me")
    assert engines.dropped == []


def test_pages_that_are_claimed_stay_until_the_last_claim_ends(engines: Engines) -> None:
    registry, mine, pages = make_registry(engines, AWARE), template(), ("m", "c", "")
    registry.add(mine)
    for _ in range(2):
        registry.claim(pages)
    registry.remove(mine.id, "me")
    registry.release(pages)
    registry.drop_unwanted(pages)
    assert engines.dropped == []
    registry.release(pages)
    registry.drop_unwanted(pages)
    assert engines.dropped == [pages]


def test_where_there_are_no_pages_none_are_dropped(engines: Engines) -> None:
    registry, unprepared = make_registry(engines, AWARE, msgspec.structs.replace(MODEL, name="exact")), template("")
    registry.add(unprepared)
    registry.remove(unprepared.id, "me")
    registry.drop_unwanted(("exact", "c", ""))
    assert engines.dropped == []
