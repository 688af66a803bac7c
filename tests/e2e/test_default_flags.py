"""A server as a new user starts it, with no flag at all: what is promised holds on any CPU.

Other tests fix the dtype, so that they say the same on every machine; here it is what `auto` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pictures import alpha_mask, encode, photo
from served_edits import assert_company_changes_nothing, client_of
from server_process import ServerProcess, start


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = start(tmp_path_factory.mktemp("server") / "scratch")
    yield server
    assert server.stop() == 0, server.log.read_text()


def test_twelve_edits_are_the_same_alone_and_in_company(server: ServerProcess) -> None:
    """Byte for byte: of several sizes and numbers of steps, masked, exact, and with a schedule."""
    wide = {"image": encode(photo(128, 96)), "mask": alpha_mask(128, 96)}
    kinds = [{}, wide, {"mask_aware": "false"}, {"step_schedule": "calibrated"}, {"num_inference_steps": 3}, {"n": 1}]
    wanted = [{"num_inference_steps": 2, "seed": seed} | kind for seed in (1, 2) for kind in kinds]
    assert len(wanted) == 12
    with client_of(server) as client:
        assert_company_changes_nothing(client, wanted)


def test_what_the_dtype_is_and_why_is_logged(server: ServerProcess) -> None:
    (line,) = [line for line in server.log.read_text().splitlines() if "--dtype auto is" in line]
    assert "INFO stencil.worker" in line
