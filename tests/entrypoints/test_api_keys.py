"""API keys: where they come from, which files are refused, and what several keys can access."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from api_calls import IMAGE, assert_refused, post_edit
from fake_engine import FakeEngine

from core.costs.load_report import StepSample
from core.errors import ConfigError
from entrypoints.api_keys import KeySource, read_key_file
from entrypoints.openai.app import ServerSettings, create_app


def key_file(tmp_path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# ours\n\n  first \r\nsésame\n  # theirs\na#b\nlast")
    assert read_key_file(path) == ["first", "sésame", "a#b", "last"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        read_key_file(key_file(tmp_path, "topsecret", mode))
    assert "topsecret" not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_permissions_of_another_owners_file_are_not_checked(tmp_path: Path) -> None:
    path = key_file(tmp_path, "k", 0o644)
    os.chown(path, 12345, 12345)
    assert read_key_file(path) == ["k"]


@pytest.mark.parametrize("content", ["", "\n \n", "# only words\n", b"\xff\xfe"])
def test_a_file_without_keys(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(ConfigError, match="key file"):
        read_key_file(key_file(tmp_path, content))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the key file"):
            read_key_file(path)


BOM = "\ufeff".encode()


@pytest.mark.parametrize(
    "content",
    [
        BOM + b"first\nsecond\n",
        BOM + b"# ours\nfirst\nsecond",
        BOM + b"\n" + BOM + b" first\r\n" + BOM + b"#\n" + BOM + b"second" + BOM,  # files that were joined
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path, content: bytes) -> None:
    assert read_key_file(key_file(tmp_path, content)) == ["first", "second"]


@pytest.mark.parametrize(
    "content", ["good\nto\0psecret", "good\nto\tpsecret", "good\nto\u200bpsecret", "good\nto\x1bpsecret"]
)
def test_a_key_that_no_client_could_send_is_named_by_its_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="line 2 of the key file") as caught:
        read_key_file(key_file(tmp_path, content))
    assert "psecret" not in str(caught.value)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(ConfigError, match="UTF-8"):
            read_key_file(key_file(tmp_path, "topsecret".encode(encoding)))


def keys_of(flags: Sequence[str], files: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    return KeySource(flags, files, environment).read()


def test_where_keys_come_from(tmp_path: Path) -> None:
    """The keys of flags and files are joined and override the environment, whose two variables are joined too."""
    environment = {"STENCIL_API_KEY": "a,b", "STENCIL_API_KEYS": "c, d,,\ufeffc"}
    path = str(key_file(tmp_path, "f\ng\n"))
    assert keys_of([], [], {}) == ()
    assert keys_of([], [], environment) == ("a,b", "c", "d")
    assert keys_of(["x", "f"], [path], environment) == ("x", "f", "g")
    assert keys_of([], [path], environment) == ("f", "g")
    assert keys_of(["x"], [], {"STENCIL_API_KEY": ""}) == ("x",), "hidden"


@pytest.mark.parametrize("blank", ["", " ", " \t\r\n", "\ufeff", ",", " , ,\n"])
@pytest.mark.parametrize("other", [{}, {"STENCIL_API_KEYS": "k"}])
def test_a_variable_that_is_set_and_blank_opens_no_server(blank: str, other: dict[str, str]) -> None:
    names = [("STENCIL_API_KEYS", {})] if "," in blank else [("STENCIL_API_KEY", other), ("STENCIL_API_KEYS", {})]
    for name, others in names:
        with pytest.raises(ConfigError, match=f"{name} is set and holds no key; unset it"):
            keys_of([], [], others | {name: blank})


@pytest.mark.parametrize("blank", ["", " ", "\t", "\ufeff "])
def test_a_blank_flag_opens_no_server(blank: str) -> None:
    for flags in ([blank], ["k", blank]):
        with pytest.raises(ConfigError, match="--api-key is empty"):
            keys_of(flags, [], {"STENCIL_API_KEY": "k"})


def test_a_key_that_no_client_could_send_is_refused_from_everywhere() -> None:
    for flags, environment in (
        (["to\0psecret"], {}),
        ([], {"STENCIL_API_KEY": "to\npsecret"}),
        ([], {"STENCIL_API_KEYS": "a,to\u200bpsecret"}),
    ):
        with pytest.raises(ConfigError, match="cannot be seen") as caught:
            keys_of(flags, [], environment)
        assert "psecret" not in str(caught.value)


async def test_each_key_opens_and_owns_its_templates(engine: FakeEngine) -> None:
    app = create_app(engine, ServerSettings(api_keys=("first", "sésame", "third"), max_upload_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for key in ("first", "sésame", "third"):
            client.headers = httpx.Headers({"authorization": f"Bearer {key}"}, encoding="utf-8")
            assert (await post_edit(client)).status_code == 200
        assert len({edit.owner for edit in engine.edits}) == 3
        path = f"/v1/templates/{(await client.post('/v1/templates', files=[IMAGE])).json()['id']}"
        assert (await client.get(path)).status_code == 200
        client.headers["authorization"] = "Bearer first"
        assert_refused(await client.get(path), 404, "template_not_found", None)
        for key in ("", "second", "firstt", "firs", "first third"):
            client.headers["authorization"] = f"Bearer {key}"
            assert_refused(await post_edit(client), 401, "invalid_api_key", None)


async def test_recent_steps_show_each_key_only_its_own_request_ids(engine: FakeEngine) -> None:
    app = create_app(engine, ServerSettings(api_keys=("first", "second"), max_upload_bytes=1000))
    ids: dict[str, str] = {}  # key -> its request
    shown: dict[str, list[list[str]]] = {}  # key -> images of each step
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for key in ("first", "second"):
            client.headers["authorization"] = f"Bearer {key}"
            ids[key] = (await post_edit(client)).headers["x-request-id"]
        images = tuple(f"{ids[key]}-{index}" for key, index in (("first", 0), ("second", 0), ("second", 1)))
        engine.recent_steps = ((StepSample(3, 30, 0.1, 0.1, 0.1, request_ids=images),) * 2, ())
        for key in ("first", "second"):
            client.headers["authorization"] = f"Bearer {key}"
            answer = (await client.get("/v1/engine/stats", params={"steps": 5})).json()
            shown[key] = [step["requests"] for step in answer["engines"][0]["recent_steps"]]
    assert shown["first"][0][0] == images[0]
    assert tuple(shown["second"][0][1:]) == images[1:]
    for key, other in (("first", "second"), ("second", "first")):
        assert ids[other] not in str(shown[key])
        assert shown[key][0] == shown[key][1], "an image keeps its name from step to step"
        assert len(set(shown[key][0])) == 3
