"""Pictures drawn in other processes are those drawn here, in the order of their seeds."""

from itertools import islice

import numpy as np
import torch

from tools.train_embedded.drawers import Drawers
from tools.train_embedded.pool import unpack_bits
from tools.train_embedded.scenes import Scene, draw_scene


def taken(drawers: Drawers[Scene], number: int) -> list[Scene]:
    return list(islice((scene for _ in range(number) for scene in drawers.take()), number))


def test_processes_draw_what_this_one_draws() -> None:
    wanted = [draw_scene(7 + i) for i in range(40)]
    assert taken(Drawers(draw_scene, 7, processes=0), 40) == wanted
    drawers = Drawers(draw_scene, 7, processes=2)
    try:
        assert taken(drawers, 40) == wanted
    finally:
        drawers.close()


def test_drawing_here_is_never_ready_before_it_is_asked() -> None:
    assert not Drawers(draw_scene, 7, processes=0).ready


def test_bits_unpack_as_numpy_unpacks_them() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 5, 32), np.uint8)
    assert (unpack_bits(torch.from_numpy(packed)).numpy() == np.unpackbits(packed, axis=-1)).all()
