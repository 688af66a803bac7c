"""Patch sets: equal ones for equal pictures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.page_scheme import PageLayout, PageScheme, latents_key, page_key, template_of, unpatched
from core.patches import Patch, PatchSet, patch_digest, patch_set

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=2, num_heads=2, head_dim=16, dtype="int8"),
    keyframes=(1.0, 0.0),
    latent_bytes=256,
    fingerprint="f",
    guidance_scale=30.0,
    mask_margin=8,
    full_steps=1,
)
patches = st.lists(st.builds(Patch, st.sampled_from("abc"), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), max_size=5)


@given(patches)
def test_order_and_names_of_one_file_do_not_matter(given_patches: list[Patch]) -> None:
    known = patch_set(given_patches)
    assert patch_set(given_patches[::-1]) == known
    assert patch_set(known) == known
    ids = [patch.id for patch in known]
    assert ids == sorted(set(ids))
    for patch in known:
        assert patch.scale == sum(other.scale for other in given_patches if other.id == patch.id) != 0


@given(patches, patches)
def test_a_templates_key_tells_its_patches_and_leads_back_to_that_without(one: list[Patch], two: list[Patch]) -> None:
    sets: list[PatchSet] = [patch_set(one), patch_set(two)]
    keys = [SCHEME.template_key("content", "salt", each) for each in sets]
    assert (keys[0] == keys[1]) == (sets[0] == sets[1])
    for key in keys:
        assert unpatched(key) == SCHEME.template_key("content", "salt")
        for entry in (page_key(key, 0.5), latents_key(key)):
            assert template_of(entry) == key
            assert unpatched(entry) == unpatched(key)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_digest_tells_scale_and_file(scale: float) -> None:
    assert patch_digest(()) == ""
    digests = {patch_digest((Patch("a", scale),)), patch_digest((Patch("b", scale),)), patch_digest((Patch("a", 0.1),))}
    assert len(digests) == 3
