"""Which rows of a batch's matrices are changed by which patches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from core.patches import Patch, PatchSet, patch_set
from model_executor.kernels.ragged import Packing, Span
from model_executor.patches.batch_patches import BatchPatches, by_patches

CPU = torch.device("cpu")
patch_sets = st.builds(patch_set, st.lists(st.builds(Patch, st.sampled_from("abc"), st.sampled_from([0.5, 1.0]))))
requests = st.lists(st.tuples(patch_sets, st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6)


def scales_of(patches: BatchPatches, spans: tuple[Span, ...]) -> dict[tuple[str, int], float]:
    """(patch, row) -> its scale there."""
    found: dict[tuple[str, int], float] = {}
    for segment in patches.segments(spans):
        for row in range(*segment.rows):
            assert (segment.patch, row) not in found
            scale = segment.scale_of((row, row + 1))
            found[segment.patch, row] = 1.0 if scale is None else float(scale)
    return found


@given(requests)
def test_each_request_has_its_patches_on_all_its_rows_and_nowhere_else(given_: list[tuple[PatchSet, int, int]]) -> None:
    sets = [patches for patches, _, _ in given_]
    packing = Packing.of([text for _, text, _ in given_], [image for _, _, image in given_])
    patches = BatchPatches(sets, CPU)
    where = patches.on(packing)
    for spans, segments in ((packing.text, where.text), (packing.image, where.image), (packing.joint, where.joint)):
        wanted = {
            (patch.id, row): patch.scale
            for span, its in zip(spans, sets, strict=True)
            for patch in its
            for row in range(*span)
        }
        assert scales_of(patches, spans) == wanted
        assert [segment.patch for segment in segments] == sorted(segment.patch for segment in segments)


@given(st.lists(patch_sets, max_size=8))
def test_requests_with_one_adapter_each_need_one_segment_per_adapter(sets: list[PatchSet]) -> None:
    """Whatever their scales."""
    single = [patches[:1] for patches in sets]
    order = by_patches(single)
    assert sorted(order) == list(range(len(sets)))
    spans = [(3 * number, 3 * number + 3) for number in range(len(sets))]
    segments = BatchPatches([single[number] for number in order], CPU).segments(spans)
    assert len(segments) == len({patch.id for patches in single for patch in patches})
