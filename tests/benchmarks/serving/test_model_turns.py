"""What a server's records say of its loads, and the simulation of the same requests."""

from __future__ import annotations

import base64

import msgspec
import pytest

from benchmarks.serving.model_turns import Measured, Models, loads_ended, simulate
from benchmarks.serving.recorded import Arrival, Loading
from benchmarks.simulation.model_scenario import FIVE
from core.handles import ModelKey
from core.messages.codec import encode

A, B, C = (ModelKey(name, "vae") for name in "abc")


def test_a_rank_loads_one_component_after_the_other() -> None:
    loading = [
        Loading(0, 1.0, (A, B)),
        Loading(1, 1.5, (C,)),
        Loading(0, 3.0, (B,)),
        Loading(0, 3.5, ()),
        Loading(1, 9.5, ()),
    ]
    assert sorted(loads_ended(loading)) == [(3.0, A, 2.0), (3.5, B, 0.5), (9.5, C, 8.0)]


@pytest.mark.parametrize(("places", "loads"), [(3, 0), (1, 1)])
def test_the_simulation_serves_what_has_come(places: int, loads: int) -> None:
    """On two ranks with a place each, the last of five models is not there before its request."""
    models = Models(FIVE.models.infos, dict(FIVE.models.sizes), [])
    (request, *_) = FIVE.trace(0)
    head = base64.b64encode(encode(msgspec.structs.replace(request, model="4"))).decode()
    batches = {(op, 1): 1.0 for op in ("text_encode", "image_encode", "denoise", "decode")}
    measured = Measured(batches, 0.0, {"text_encoder": 10.0, "transformer": 20.0, "vae": 5.0})
    served = simulate(models, models.budget(places), measured, [Arrival(head, 100.0, 1)])
    assert served.loads == loads
    assert served.mean == pytest.approx(28 + 3 + 20.0 * loads)
