"""Which arrays of a request are copied to another machine, and which come back."""

from __future__ import annotations

import msgspec
from fakes import make_edit, make_selecting_edit, with_spec
from run_workflows import DIAMOND, run_request

from core.handles import ArrayRef, Artefact
from core.messages.request_arrays import arrays_read, arrays_written, moved

PICTURE = Artefact(ArrayRef(0, 64, (8, 8, 3), "uint8"))


def offsets(refs: list[ArrayRef]) -> list[int]:
    return sorted(ref.offset for ref in refs)


def test_an_array_with_two_names_is_copied_once_as_a_whole() -> None:
    short, long = ArrayRef(0, 128, (4,), "int32"), ArrayRef(0, 128, (16,), "int32")
    edit = with_spec(make_edit("e"), outputs={"picture": PICTURE}, active=short, inputs={"same": long})
    (found,) = [ref for ref in arrays_read(edit) if ref.offset == 128]
    assert found == long


def test_memory_for_a_mask_that_is_found_comes_back_with_room_for_all_tokens() -> None:
    edit = with_spec(make_selecting_edit("e"), outputs={"picture": PICTURE}, mask=ArrayRef(0, 256, (8, 8), "uint8"))
    assert offsets(arrays_written(edit)) == [64, 256, 4096]
    active = next(ref for ref in arrays_written(edit) if ref.offset == 4096)
    assert active.shape == (edit.picture.num_tokens,)
    assert not {64, 256, 4096} & set(offsets(arrays_read(edit)))


def test_arrays_of_a_run_of_users_classes() -> None:
    run = run_request("r", DIAMOND)
    places = {ref.offset: ref.offset + 4096 for ref in [*arrays_read(run), *arrays_written(run)]}
    there = moved(run, places)
    assert offsets(arrays_read(there)) == [offset + 4096 for offset in offsets(arrays_read(run))]
    assert offsets(arrays_written(there)) == [offset + 4096 for offset in offsets(arrays_written(run))]
    assert moved(there, {new: old for old, new in places.items()}) == run


def test_empty_arrays_are_nowhere_and_stay_there() -> None:
    empty = ArrayRef(0, 0, (0,), "uint8")
    edit = with_spec(
        make_edit("e"), template=empty, mask=empty, active=empty, outputs={"picture": PICTURE}, previews=()
    )
    assert arrays_read(edit) == []
    there = moved(edit, {64: 0})
    assert there.picture.pixels.offset == 0
    assert msgspec.structs.replace(there.picture, outputs={"picture": PICTURE}) == edit.spec
