"""Arbitrary Python and NumPy values in every field of the offline API, on real processes: no process dies, and the only
errors are InvalidRequestError, and timeouts that the caller set.

    make fuzz          FUZZ_REQUESTS=6000 by default, a sixth of them here
    make test          a hundred
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from arbitrary_values import numpy_scalars, values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from core.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from core.sampling_params import SamplingParams
from entrypoints import Edit, ImageEngine

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "600")) // 6
AT_ONCE = 4
STEADY = SamplingParams(seed=7)

arrays = npst.arrays(
    st.sampled_from([np.uint8, np.uint8, np.bool_, np.int64, np.float32]), npst.array_shapes(max_dims=4, max_side=24)
)
modes = st.sampled_from(["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "I", "F", "CMYK", "YCbCr", "HSV"])
pictures = st.one_of(
    st.just(np.zeros((32, 32, 3), np.uint8)),
    arrays,
    st.builds(Image.new, modes, st.tuples(st.integers(0, 40), st.integers(1, 40))),
    st.binary(max_size=64),
    values,
)
sides = st.one_of(st.integers(16, 96), st.sampled_from([np.int64(64), np.uint8(32), 0, -64, 64.0, True, 2**40]))
edit_fields: dict[str, st.SearchStrategy[Any]] = {
    "prompt": values,
    "image": pictures,
    "mask": pictures,
    "mask_image": pictures,
    "size": st.one_of(st.tuples(sides, sides), st.lists(sides, max_size=3), values),
    "template_id": values,
    "padding_mask_crop": st.one_of(st.integers(-2, 70_000), numpy_scalars, values),
    "lora": st.one_of(values, st.lists(st.dictionaries(st.sampled_from(["name", "scale"]), values))),
}
small = st.one_of(st.integers(-1, 4), st.integers(0, 4).map(np.int64), st.integers(0, 4).map(np.float32), values)
sampling_fields = {name: small for name in SamplingParams.__struct_fields__ if name != "timeout"}
sampling_fields["timeout"] = st.one_of(st.floats(0.01, 60), values)
sampling_fields["n"] = st.one_of(st.integers(-1, 2), numpy_scalars, values)


def some(fields: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


calls = st.tuples(some(edit_fields, 2), some(sampling_fields, 2))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[ImageEngine]:
    with ImageEngine(str(tiny_checkpoint), dtype="float32", threads=1) as engine:
        yield engine


def make(edit: dict[str, Any], sampling: dict[str, Any]) -> tuple[Edit, SamplingParams] | InvalidRequestError:
    try:
        defaults = {"num_inference_steps": 1}
        return Edit(**{"prompt": "x"} | edit), SamplingParams(**defaults | sampling)
    except InvalidRequestError as error:
        return error


def steady_picture(engine: ImageEngine) -> bytes:
    (result,) = engine.generate([Edit(prompt="a red hat", size=(64, 64))], STEADY, use_tqdm=False)
    assert result.error is None
    return result.images[0].tobytes()


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_no_value_of_any_field_ends_a_process_or_raises_anything_else(engine: ImageEngine) -> None:
    expected, before, tally = steady_picture(engine), processes(), Counter[str]()

    @settings(
        max_examples=NUM_REQUESTS // AT_ONCE + 1,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(calls, min_size=AT_ONCE, max_size=AT_ONCE), pictures, values)
    def run(many: list[tuple[dict[str, Any], dict[str, Any]]], picture: Any, lora: Any) -> None:
        made = [make(*one) for one in many]
        good = [one for one in made if not isinstance(one, InvalidRequestError)]
        tally["refused when made"] += len(made) - len(good)
        results = engine.generate([edit for edit, _ in good], [params for _, params in good], use_tqdm=False)
        for (_, params), result in zip(good, results, strict=True):
            late = (DeadlineExceededError, OverloadedError) if params.timeout is not None else ()
            assert result.error is None or isinstance(result.error, (InvalidRequestError, *late)), result.error
            tally["done" if result.error is None else type(result.error).__name__] += 1
        try:
            engine.create_template(picture, lora=lora)
        except InvalidRequestError:
            tally["templates refused"] += 1

    run()
    print("\n" + ", ".join(f"{what} {count}" for what, count in tally.most_common()))
    assert tally["done"] > 0
    if NUM_REQUESTS >= 1000:  # fewer may all be refused when they are made
        assert tally["InvalidRequestError"] + tally["InvalidImageError"] > 0
    assert tally["refused when made"] > 0
    assert processes() == before, "a process has died"
    assert steady_picture(engine) == expected
