"""Other users of the machine, and readers of the log, learn no secrets from a real server."""

from __future__ import annotations

import base64
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from fault_kit import shim
from pictures import alpha_mask, encode, photo
from server_process import ServerProcess, start

KEYS = ("sk-one-1e9f", "sk-two-7c4d")
FAILING = "a wish that fails"
TOO_LONG = "a wish too long " * 50
SECRETS = (*KEYS, "sk-wrong-55aa", "a wish of mine", "no such thing", "holiday.png", FAILING, "a wish too long")
BREAK = f"""
def inject(module, folder):
    encode = module.HANDLERS["text_encode"]

    def broken(context, items):
        if any(item.work.prompt == {FAILING!r} for item in items):
            raise RuntimeError("the device is on fire")
        return encode(context, items)

    module.HANDLERS["text_encode"] = broken
"""
"""A worker that is to encode this prompt fails, as by a bug."""
IMAGE = encode(photo())


@dataclass
class Seen:
    """Everything that could be observed while the server worked."""

    log: str
    command_lines: list[str]
    modes: dict[str, str]  # path below the temporary folder, and the folder of pages -> type and mode
    memory: set[str]  # names of shared memory that the processes have mapped
    listening: set[str]  # addresses
    answers: list[httpx.Response]


@pytest.fixture(scope="module")
def seen(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("private")
    keys = folder / "keys"
    keys.write_text("# two\n" + "\n".join(KEYS))
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--log-format", "json", "--rate-limit", "3")
    pages = ("--cache-disk-bytes", "64M", "--cache-dir", str(folder / "pages"))
    umask = os.umask(0)  # the most careless one
    with pytest.MonkeyPatch.context() as environment:
        shim(folder, environment, BREAK)
        try:
            server = start(folder / "scratch", *server_flags, *flags, *pages)
        finally:
            os.umask(umask)
    answers = use(server)
    processes = [psutil.Process(server.process.pid), *server.children()]
    command_lines = [" ".join(process.cmdline()) + process.name() for process in processes]
    modes = modes_below(folder / "scratch") | modes_below(folder / "pages")
    memory = {area.path for process in processes for area in process.memory_maps() if "memfd" in area.path}
    memory |= {area.path for process in processes for area in process.memory_maps() if "/dev/shm" in area.path}
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert server.stop() == 0, server.log.read_text()
    return Seen(server.log.read_text(), command_lines, modes, memory, listening, answers)


def modes_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder.parent)): stat.filemode(path.lstat().st_mode) for path in folder.rglob("*")}


def use(server: ServerProcess) -> list[httpx.Response]:
    data = {"prompt": "a wish of mine", "negative_prompt": "no such thing"}
    files = {"image": ("holiday.png", IMAGE), "mask": alpha_mask()}
    sent = [("sk-wrong-55aa", {}), (KEYS[0], {}), (KEYS[0], {"n": "99"}), (KEYS[0], {"stream": "true"}), (KEYS[0], {})]
    return [
        httpx.post(
            f"{server.base_url}/images/edits",
            data=data | more,
            files=files,
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
        )
        for key, more in [*sent, (KEYS[1], {}), (KEYS[1], {"prompt": FAILING}), (KEYS[1], {"prompt": TOO_LONG})]
    ]


def test_keys_and_the_rate_limit_work(seen: Seen) -> None:
    assert [answer.status_code for answer in seen.answers] == [401, 200, 400, 200, 429, 200, 500, 200]
    assert 1 <= int(seen.answers[4].headers["retry-after"]) <= 20


def test_the_log_holds_no_secrets(seen: Seen) -> None:
    lines = [json.loads(line) for line in seen.log.splitlines()]
    assert sum(line.get("path") == "/v1/images/edits" for line in lines) == len(seen.answers)
    painted = seen.answers[1].json()["data"][0]["b64_json"]
    pieces = [base64.b64encode(IMAGE).decode()[:40], repr(IMAGE[:20])[2:-1], painted[:40], painted[-40:]]
    assert "the device is on fire" in seen.log
    assert seen.answers[-1].json()["stencil"]["prompt_truncated"]
    for secret in (*SECRETS, *pieces):
        assert secret not in seen.log


def test_the_text_of_a_failure_is_only_in_the_log(seen: Seen) -> None:
    assert seen.answers[6].json()["error"]["code"] == "internal_error"
    assert "fire" not in seen.answers[6].text
    told = [json.loads(line) for line in seen.log.splitlines() if "on fire" in line]
    assert {line["request_id"] for line in told if "request_id" in line} == {seen.answers[6].headers["x-request-id"]}


def test_command_lines_hold_no_keys(seen: Seen) -> None:
    assert len(seen.command_lines) >= 4
    assert not [line for line in seen.command_lines for key in KEYS if key in line]


def test_files_and_sockets_are_accessible_to_the_user_only(seen: Seen) -> None:
    assert any("pages" in path for path in seen.modes)
    private = {path for path, mode in seen.modes.items() if mode.endswith("------")}
    for path in set(seen.modes) - private:
        assert private & {str(parent) for parent in Path(path).parents}, (path, seen.modes[path])


def test_shared_memory_has_no_name(seen: Seen) -> None:
    assert any("stencil-arena" in name for name in seen.memory)
    assert all(name.startswith("/memfd:") for name in seen.memory)


def test_it_listens_on_loopback_alone(seen: Seen) -> None:
    assert seen.listening == {"127.0.0.1"}
