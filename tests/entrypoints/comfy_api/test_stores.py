"""What is kept for callers: within limits, of which owners have their own, and by names that are checked."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequestError
from engine.client.upload import KeptUpload
from entrypoints.comfy_api.files import FileName, Files, StoredFile, media_type
from entrypoints.comfy_api.history import History
from entrypoints.comfy_api.owned_store import OwnedStore, StoreLimits


def keys(store: OwnedStore[str, int], owner: str) -> list[str]:
    return [key for key, _ in store.of(owner)]


def test_the_oldest_of_an_owner_go_first() -> None:
    store: OwnedStore[str, int] = OwnedStore(StoreLimits(number=3, nbytes=10, number_in_all=100, nbytes_in_all=100))
    for key in "abcd":
        store.put("one", key, 1, nbytes=1)
    store.put("two", "a", 1, nbytes=1)
    assert keys(store, "one") == ["b", "c", "d"]
    store.put("one", "e", 1, nbytes=9)
    assert keys(store, "one") == ["d", "e"]
    store.put("one", "d", 2, nbytes=1)
    store.put("one", "f", 1, nbytes=1)
    assert (keys(store, "one"), keys(store, "two")) == (["d", "f"], ["a"])
    assert store.get("one", "d") == 2
    assert store.get("two", "d") is None


def test_who_has_most_makes_room_when_there_is_too_much() -> None:
    store: OwnedStore[str, int] = OwnedStore(StoreLimits(number=10, nbytes=10, number_in_all=4, nbytes_in_all=12))
    for owner in ("one", "two"):
        for key in "ab":
            store.put(owner, key, 1, nbytes=2)
    store.put("three", "a", 1, nbytes=2)
    assert [keys(store, owner) for owner in ("one", "two", "three")] == [["b"], ["a", "b"], ["a"]]
    store.put("three", "b", 1, nbytes=9)
    assert [keys(store, owner) for owner in ("one", "two", "three")] == [[], ["b"], ["b"]]


def test_an_owner_with_little_keeps_it() -> None:
    store: OwnedStore[str, int] = OwnedStore(StoreLimits(number=10, nbytes=10, number_in_all=10, nbytes_in_all=12))
    for owner, key, nbytes in (("little", "a", 1), ("much", "a", 6), ("much", "b", 4), ("new", "a", 3)):
        assert store.put(owner, key, 1, nbytes)
    assert [keys(store, owner) for owner in ("little", "much", "new")] == [["a"], ["b"], ["a"]]


def test_what_is_used_counts_as_new() -> None:
    store: OwnedStore[str, int] = OwnedStore(StoreLimits(number=2, nbytes=9, number_in_all=9, nbytes_in_all=9))
    for key in "ab":
        store.put("one", key, 1, nbytes=1)
    assert (store.use("one", "a"), store.use("one", "c"), store.use("two", "a")) == (1, None, None)
    store.put("one", "c", 1, nbytes=1)
    assert keys(store, "one") == ["a", "c"]


def test_pictures_that_are_made_push_no_uploads_out() -> None:
    files = Files(StoreLimits(number=2, nbytes=9, number_in_all=9, nbytes_in_all=9))
    upload, file = FileName("a.png", "", "input"), StoredFile(KeptUpload([b"x"]))
    files.put("one", upload, file)
    for _ in range(5):
        files.put("one", files.new_name("one", "x", "output"), file)
    assert files.find("one", upload) is file


def test_what_is_too_large_for_an_owner_is_not_kept() -> None:
    store: OwnedStore[str, int] = OwnedStore(StoreLimits(number=10, nbytes=10, number_in_all=10, nbytes_in_all=10))
    assert store.put("one", "a", 1, nbytes=2)
    assert store.put("one", "b", 1, nbytes=2)
    assert not store.put("one", "a", 2, nbytes=11)
    assert (keys(store, "one"), store.get("one", "a")) == (["a", "b"], 1)
    assert store.put("one", "c", 1, nbytes=10)
    assert keys(store, "one") == ["c"]


def test_a_history_is_shown_from_its_end_or_from_a_place() -> None:
    history = History()
    for number in range(5):
        history.put("one", f"p{number}", {"number": number})
    assert list(history.of("one")) == ["p0", "p1", "p2", "p3", "p4"]
    assert list(history.of("one", 2)) == ["p3", "p4"]
    assert list(history.of("one", 2, 1)) == ["p1", "p2"]
    assert list(history.of("one", 10, 4)) == ["p4"]
    assert list(history.of("one", -1)) == []
    assert list(history.of("one", 10**30)) == ["p0", "p1", "p2", "p3", "p4"]
    assert list(history.of("one", 10**30, 10**30)) == []
    assert bytes(history.find("one", "p1")["p1"]) == b'{"number":1}'
    assert history.find("two", "p1") == {}
    history.remove("one", ["p1", "none"])
    history.clear("two")
    assert len(history.of("one")) == 4
    history.clear("one")
    assert history.of("one") == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.png", FileName("a.png", "", "input")),
        ("sub/der/a b.png", FileName("a b.png", "sub/der", "input")),
        ("a.png [output]", FileName("a.png", "", "output")),
        ("sub/a.png [temp]", FileName("a.png", "sub", "temp")),
        ("a [other].png", FileName("a [other].png", "", "input")),
    ],
)
def test_nodes_name_files(text: str, name: FileName) -> None:
    assert FileName.of_input(text) == name


@pytest.mark.parametrize("text", ["", "/", "..", "../a.png", "a/../b.png", "a\\b.png", "a\n.png", 'a".png'])
def test_names_stay_in_their_folder(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        FileName.of_input(text)
    with pytest.raises(InvalidRequestError):
        FileName.of("a" * 300)
    with pytest.raises(InvalidRequestError):
        FileName.of("a.png", folder="models")


@pytest.mark.parametrize("subfolder", ["a/b", "a//b", "./a/b/", "/a/./b"])
def test_a_subfolder_has_one_name(subfolder: str) -> None:
    assert FileName.of("x.png", subfolder).subfolder == "a/b"


def test_a_name_that_is_taken_gets_a_number() -> None:
    files, file, other = Files(), StoredFile(KeptUpload([b"x"])), StoredFile(KeptUpload([b"y"]))
    for name in ("a.png", "a", "a.b.png"):
        wanted = FileName(name, "", "input")
        assert files.free_name("one", wanted, file) == wanted
        files.put("one", wanted, file)
        assert files.free_name("two", wanted, file) == wanted
    names = [files.free_name("one", FileName(name, "", "input"), other).name for name in ("a.png", "a", "a.b.png")]
    assert names == ["a (1).png", "a (1)", "a.b (1).png"]
    files.put("one", FileName("a (1).png", "", "input"), other)
    assert files.free_name("one", FileName("a.png", "", "input"), other).name == "a (1).png"  # it is kept already
    assert files.free_name("one", FileName("a.png", "", "input"), StoredFile(file.content, other)).name == "a (2).png"
    long = FileName.of("a" * 251 + ".png", "", "input")
    files.put("one", long, file)
    with pytest.raises(InvalidRequestError):
        files.free_name("one", long, other)
    assert files.new_name("one", "sub/x", "output") == FileName("x_00001_.png", "sub", "output")
    assert files.new_name("one", "x", "output") == FileName("x_00002_.png", "", "output")
    assert files.new_name("two", "x", "temp") == FileName("x_00001_.png", "", "temp")


def test_pictures_are_told_by_how_they_begin() -> None:
    heads = (b"\x89PNG\r\n\x1a\n1234", b"\xff\xd8\xff\xe0", b"RIFF1234WEBP", b"RIFF1234WAVE", b"<svg>", b"")
    assert [media_type(head) for head in heads] == ["image/png", "image/jpeg", "image/webp", "", "", ""]
