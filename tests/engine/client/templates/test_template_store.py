"""The store of registered templates: owners, budget, eviction of the least recently used, and the uploads it keeps."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequestError, TemplateNotFoundError
from engine.client.templates import template_store as templates
from engine.client.templates.template_store import RegisteredTemplate, TemplateStore
from engine.client.upload import CHUNK_BYTES, BytesUpload, KeptUpload


def template(
    size: int = 10, owner: str = "me", content_id: str = "c", model: str = "m", *, is_captured: bool = False
) -> RegisteredTemplate:
    return RegisteredTemplate(
        upload=KeptUpload([b"x" * size]),
        owner=owner,
        model=model,
        width=16,
        height=16,
        image_tokens=1,
        created=0,
        content_id=content_id,
        is_captured=is_captured,
    )


def test_ids_are_long_and_random() -> None:
    ids = {template().id for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("tmpl_") and len(name) == 37 for name in ids)


def test_another_owners_template_is_as_unknown_as_a_missing_one() -> None:
    store, mine = TemplateStore(100), template()
    store.add(mine)
    assert store.get(mine.id, "me") is mine
    messages = []
    for name, owner in ((mine.id, "you"), (mine.id, ""), ("tmpl_0", "me")):
        for call in (store.get, store.use, store.remove):
            with pytest.raises(TemplateNotFoundError) as caught:
                call(name, owner)
            assert caught.value.code == "template_not_found"
            assert caught.value.param == ("template_id" if call == store.use else None)
            messages.append(str(caught.value).replace(name, ""))
    assert len(set(messages)) == 1
    assert mine.id in store


def test_the_least_recently_used_ones_make_room() -> None:
    store = TemplateStore(30)
    a, b, c = (template(10, content_id=name) for name in "abc")
    for each in (a, b, c):
        assert store.add(each) == []
    store.use(a.id, "me")
    store.get(b.id, "me")  # looking is not using
    assert store.add(template(15)) == [b, c]
    assert a.id in store
    with pytest.raises(TemplateNotFoundError):
        store.use(b.id, "me")
    store.check_integrity()


def test_crops_belong_to_their_template(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first, second = TemplateStore(100), template(content_id=""), template(content_id="c")
    store.add(first)
    store.add(second)
    store.add_view(first.id, "left")
    store.set_content(first.id, "c")
    for content_id in ("right", "left"):
        store.add_view(first.id, content_id)
    store.check_integrity()
    assert store.get(first.id, "me").content_ids == ("c", "left", "right")
    assert store.holds_content("m", "left")
    store.add_view(second.id, "left")
    assert store.remove(first.id, "me").content_ids == ("c", "left", "right")
    assert store.holds_content("m", "left"), "the other's"
    assert not store.holds_content("m", "right")
    store.add_view(first.id, "gone")
    monkeypatch.setattr(templates, "MAX_VIEWS", 2)
    for content_id in ("x", "y"):
        store.add_view(second.id, content_id)
    assert store.get(second.id, "me").views == ("x", "y")
    assert not store.holds_content("m", "left")
    store.check_integrity()


def test_captured_ones_make_room_before_registered_ones() -> None:
    store, registered = TemplateStore(30), template(10)
    first, second, third = (template(10, is_captured=True) for _ in range(3))
    for each in (registered, first, second):
        assert store.add(each) == []
    assert store.add(third) == [first]
    assert store.add(template(15)) == [second, third]
    assert registered.id in store
    store.check_integrity()


def test_a_captured_one_that_an_edit_named_is_as_if_registered() -> None:
    store, used, other = TemplateStore(20), template(10, is_captured=True), template(10, is_captured=True)
    store.add(used)
    store.add(other)
    store.get(other.id, "me")  # looking is not using
    store.use(used.id, "me")
    newcomer = template(10, is_captured=True)
    assert store.add(newcomer) == [other]
    assert store.add(template(10)) == [newcomer]
    assert [each.id for each in store.add(template(10))] == [used.id]
    store.check_integrity()


def test_a_captured_one_displaces_no_registered_one() -> None:
    store, registered, kept = TemplateStore(30), template(20), template(5, is_captured=True)
    store.add(registered)
    store.add(kept)
    large = template(11, is_captured=True)
    assert store.add(large) == [large]
    assert large.id not in store
    assert registered.id in store
    assert kept.id in store
    store.check_integrity()


def test_a_template_that_can_never_fit_is_refused_with_the_remedy_and_displaces_nothing() -> None:
    store, kept = TemplateStore(30), template(30)
    store.add(kept)
    with pytest.raises(InvalidRequestError, match="--template-bytes") as caught:
        store.add(template(31))
    assert (caught.value.param, caught.value.code) == ("image", "image_too_large")
    assert kept.id in store


def test_pages_are_shared_by_content_and_model() -> None:
    store, first, second = TemplateStore(100), template(owner="me"), template(owner="you")
    other_model = template(model="n")
    for each in (first, second, other_model):
        store.add(each)
    store.remove(first.id, "me")
    assert store.holds_content("m", "c")
    store.remove(second.id, "you")
    assert not store.holds_content("m", "c")
    assert store.holds_content("n", "c")


def test_pages_with_another_salt_are_others() -> None:
    store, mine = TemplateStore(100), replace(template(owner="me"), cache_salt="me")
    store.add(mine)
    assert store.holds_content("m", "c", "me")
    assert not store.holds_content("m", "c", "you")
    assert not store.holds_content("m", "c")


def test_later_results_update_a_template_that_is_still_stored() -> None:
    store, kept, gone = TemplateStore(100), template(content_id=""), template(content_id="")
    store.add(kept)
    for name in (kept.id, gone.id):
        store.set_content(name, "late")
        store.set_primed(name, 77)
    seen = store.get(kept.id, "me")
    assert (seen.content_id, seen.primed, seen.page_bytes) == ("late", True, 77)
    assert store.holds_content("m", "late")
    assert not store.holds_content("m", "")
    assert gone.id not in store
    store.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "use", "remove", "content"]), st.integers(0, 40), st.sampled_from("abc")),
        max_size=40,
    )
)
def test_sizes_and_order_are_right_after_any_history(history: list[tuple[str, int, str]]) -> None:
    """Against a plain list of stored templates with their sizes, least recently used first."""
    store, held = TemplateStore(100), list[tuple[str, int]]()
    for action, number, content in history:
        if action == "add":
            new = template(number, content_id=content)
            gone = [each.id for each in store.add(new)]
            held.append((new.id, number))
            while sum(size for _, size in held) > 100:
                assert gone.pop(0) == held.pop(0)[0]
            assert not gone
        elif held:
            name, size = held[number % len(held)]
            match action:
                case "use":
                    store.use(name, "me")
                    held.remove((name, size))
                    held.append((name, size))
                case "remove":
                    store.remove(name, "me")
                    held.remove((name, size))
                case "content":
                    store.set_content(name, content)
        store.check_integrity()
        assert len(store) == len(held)
        assert all(name in store for name, _ in held)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
async def test_kept_uploads_hold_the_same_bytes(size: int) -> None:
    data = os.urandom(size)
    for kept in (
        await KeptUpload.of(BytesUpload(data)),
        await KeptUpload.of_output(memoryview(data), is_base64=False),
        await KeptUpload.of_output(memoryview(base64.b64encode(data)), is_base64=True),
    ):
        assert kept.size == size
        for _ in range(2):  # as often as it is edited
            pieces = [piece async for piece in kept.chunks()]
            assert b"".join(pieces) == data
            assert all(len(piece) <= CHUNK_BYTES for piece in pieces)
