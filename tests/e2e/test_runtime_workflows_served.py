"""Workflows that are registered, replaced and deleted while a server runs, on two engines, some of which die."""

from __future__ import annotations

import base64
import io
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from server_process import ServerProcess, fork
from workflow_texts import SOUND

ADMIN, USER = "admin-key", "user-key"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"

HELD = """
import time
from pathlib import Path
from entrypoints.workflows import Model, Workflow, steps

class Held(Model):
    def setup_io(self):
        self.add_input("gate", str)
        self.add_input("round", int)
        self.add_output("made", int)

    def load(self, device, dtype):
        import torch
        self.weights = torch.zeros(1000, 1000)

    def execute(self, gate, round):
        if not Path(gate).exists():
            time.sleep(0.1)
        return {"made": NUMBER}

    def __del__(self):
        Path("FOLDER", "freed-NUMBER").touch()

with Workflow(name="held") as held:
    gate, rounds = held.add_input("gate", str), held.add_input("rounds", int)
    for step in steps(rounds):
        made = Held()(gate, step)
    held.add_output(made, name="made")
"""
"""Makes NUMBER in a number of rounds, which are short once a file is there, and says when it is freed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def server(server_flags: tuple[str, ...], folder: Path) -> Iterator[ServerProcess]:
    keys = folder / "admin.keys"
    keys.write_text(f"{ADMIN}\n")
    keys.chmod(0o600)
    (folder / "sound.py").write_text(SOUND.replace("NAME", "from-start"))
    flags = ("--allow-runtime-workflows", "--admin-key-file", str(keys), "--api-key", USER)
    more = ("--data-parallel-size", "2", "--router-policy", "round-robin", "--workflow", str(folder / "sound.py"))
    server = fork(folder / "scratch", *server_flags, *flags, *more)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def user(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers={"authorization": f"Bearer {USER}"}, timeout=60) as client:
        yield client


def held(number: int, folder: Path) -> str:
    return HELD.replace("NUMBER", str(number)).replace("FOLDER", str(folder))


def register(admin: httpx.Client, text: str | bytes) -> list[str]:
    answer = admin.post("/workflows", content=text)
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["data"]]


def run(user: httpx.Client, name: str, **inputs: Any) -> Any:
    answer = user.post("/images/generations", json={"model": name} | inputs)
    return (
        answer.json()["values"] if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["code"])
    )


def served(user: httpx.Client) -> list[str]:
    return [model["id"] for model in user.get("/models").json()["data"]]


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_running(user: httpx.Client) -> int:
    return int(user.get("/engine/stats").json()["queue"]["running"])


def num_admitted(user: httpx.Client) -> int:
    return int(user.get("/engine/stats").json()["queue"]["admitted"])


def components(user: httpx.Client) -> list[str]:
    """The kinds of what the workers have loaded."""
    engines = user.get("/engine/stats").json()["engines"]
    return [each["component"] for engine in engines for each in engine["resident_models"] or ()]


def kill(server: ServerProcess, name: str) -> None:
    found = [child for child in server.children() if any(word == name for word in child.cmdline())]
    assert found, [child.cmdline() for child in server.children()]
    for process in found:
        process.kill()


def test_a_registered_workflow_runs_on_every_engine_until_it_is_deleted(
    admin: httpx.Client, user: httpx.Client
) -> None:
    assert run(user, "twice", x=1) == (404, "model_not_found")
    assert register(admin, SOUND.replace("NAME", "twice")) == ["twice"]
    assert served(user) == ["tiny/fill", "from-start", "twice"]
    assert user.get("/models/twice").json()["inputs"] == [{"name": "x", "type": "integer", "required": True}]
    assert [run(user, "twice", x=number) for number in range(4)] == [{"y": 2 * number} for number in range(4)]
    assert register(admin, SOUND.replace("NAME", "twice")) == ["twice"], "again is as before"
    assert admin.delete("/workflows/twice").json() == {"id": "twice", "object": "model", "deleted": True}
    assert run(user, "twice", x=1) == (404, "model_not_found")
    assert admin.delete("/workflows/twice").status_code == 404
    assert served(user) == ["tiny/fill", "from-start"]


def test_running_requests_end_on_the_workflow_that_they_began_and_its_weights_are_freed(
    admin: httpx.Client, user: httpx.Client, folder: Path
) -> None:
    """On both engines, once the last of these requests is over; of one that is replaced, and of one that is deleted."""
    gate = folder / "gate"
    until(lambda: "class" not in components(user))
    register(admin, held(1, folder))
    assert components(user).count("class") > 1, "they are loaded before it is served"
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(run, user, "held", gate=str(gate), rounds=200) for _ in range(2)]
        until(lambda: num_running(user) == 2)
        register(admin, held(2, folder))
        second = [pool.submit(run, user, "held", gate=str(gate), rounds=2) for _ in range(2)]
        until(lambda: num_admitted(user) == 4)
        assert admin.delete("/workflows/held").status_code == 200
        assert run(user, "held", gate="", rounds=1) == (404, "model_not_found")
        assert not any(each.done() for each in (*first, *second))
        gate.touch()
        assert [each.result() for each in first] == [{"made": 1}] * 2
        assert [each.result() for each in second] == [{"made": 2}] * 2
    until((folder / "freed-1").exists)
    until((folder / "freed-2").exists)
    until(lambda: "class" not in components(user))
    assert "transformer" in components(user)


def test_a_registration_survives_engines_and_workers(
    server: ServerProcess, admin: httpx.Client, user: httpx.Client
) -> None:
    """What is deleted while they are away is not."""
    register(admin, SOUND.replace("NAME", "kept"))
    register(admin, SOUND.replace("NAME", "gone"))
    before = server.log.read_text()
    kill(server, "stencil-engine-0")
    assert run(user, "kept", x=3) == {"y": 6}
    until(lambda: "restarting" not in httpx.get(f"{server.url}/health").text)
    assert [run(user, name, x=4) for name in ("kept", "gone") * 2] == [{"y": 8}] * 4
    kill(server, "stencil-worker-1")
    assert admin.delete("/workflows/gone").status_code == 200
    assert [run(user, "kept", x=5) for _ in range(4)] == [{"y": 10}] * 4
    assert run(user, "gone", x=5) == (404, "model_not_found")
    assert "requests with" not in server.log.read_text().removeprefix(before)


def guarded(most_red: str) -> str:
    text = EXAMPLES.joinpath("guarded.py").read_text()
    return text.replace("<= most_red", f"<= most_red + {most_red}")


def painted(user: httpx.Client, model: str, **fields: Any) -> list[bytes]:
    """The files of partial images and of the picture."""
    asked = {"model": model, "prompt": "a hat", "size": "64x64", "num_inference_steps": 4, "seed": 1} | fields
    answer = user.post("/images/generations", json=asked)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return [base64.b64decode(answer.json()["data"][0]["b64_json"])]
    events = (json.loads(part.partition("\n")[0]) for part in answer.text.split("data: ")[1:])
    return [base64.b64decode(event["b64_json"]) for event in events]


def is_black(file: bytes) -> bool:
    return not np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).any()


def test_a_workflow_that_makes_a_models_pictures_is_a_name_beside_the_model(
    server: ServerProcess, admin: httpx.Client, user: httpx.Client
) -> None:
    """Replaced, deleted and sent again to an engine that starts again; partial images pass its class."""
    before = user.get("/models/tiny/fill").json()
    answer = admin.post("/workflows", params={"model": "tiny/fill"}, content=guarded("0"))
    assert answer.json()["data"] == [{"id": "guarded", "object": "model"}], answer.text
    listed = user.get("/models/guarded").json()
    assert [each["name"] for each in listed["inputs"]] == ["most_red"]
    assert [each["name"] for each in listed["outputs"]] == ["is_safe"]
    assert listed["partial_images"] is True
    assert {name: listed[name] for name in before if name not in ("id", "created")} == {
        name: before[name] for name in before if name not in ("id", "created")
    }
    (plain,) = painted(user, "tiny/fill")
    kill(server, "stencil-engine-0")
    for _ in range(4):
        assert painted(user, "guarded", most_red=255) == [plain]
    until(lambda: "restarting" not in httpx.get(f"{server.url}/health").text)
    for _ in range(2):
        files = painted(user, "guarded", most_red=-255, stream=True, partial_images=2)
        assert len(files) == 3
        assert all(map(is_black, files))
    refused = user.post("/images/generations", json={"model": "guarded", "prompt": "a hat", "most_red": "much"})
    assert refused.json()["error"]["param"] == "most_red"
    register(admin, guarded("1000"))
    assert painted(user, "guarded", most_red=-255) == [plain], "the first model is the one that is meant"
    assert admin.delete("/workflows/guarded").status_code == 200
    assert run(user, "guarded", prompt="a hat") == (404, "model_not_found")
    assert admin.delete("/workflows/guarded").status_code == 404
    assert (painted(user, "tiny/fill"), user.get("/models/tiny/fill").json()) == ([plain], before)


def test_what_a_workflow_lacks_is_named(admin: httpx.Client, user: httpx.Client) -> None:
    before = served(user)
    answer = admin.post("/workflows", content=EXAMPLES.joinpath("figure7.py").read_text())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_workflow", "control_net"), answer.text
    assert "tiny/fill has no controlnet; start the server with one" in error["message"]
    assert served(user) == before


def other_class(body: str) -> str:
    return SOUND.replace("NAME", "bad") + "\n" + body


REFUSED: dict[str, tuple[str | bytes, int, str, str]] = {
    "nothing": ("", 400, "invalid_workflow", "it has no workflow"),
    "no Python": ("with Workflow(name=", 400, "invalid_workflow", "line 1"),
    "no text": (b"\xff\xfe", 400, "invalid_value", "not UTF-8"),
    "too large": ("#" * 300_000, 413, "request_too_large", "262144"),
    "a zero byte": ("\x00", 400, "invalid_workflow", "null byte"),
    "a shipped workflow": (SOUND.replace("NAME", "inpaint"), 400, "name_taken", "'inpaint'"),
    "a wrong input": (
        SOUND.replace("NAME", "bad").replace('add_input("x", int)), name', 'add_input("x", str)), name'),
        400,
        "invalid_workflow",
        "node twice, input x",
    ),
    "an error": (other_class("raise ValueError('it will not')"), 400, "invalid_workflow", "line 18: ValueError: it"),
    "a class that is none": (
        SOUND.replace("NAME", "bad").replace(
            "    def execute(self, x):\n        return", "    def run(self, x):\n        return"
        ),
        400,
        "invalid_workflow",
        "Twice",
    ),
    "a class that workers cannot import": (
        other_class("import sys\nif 'torch' in sys.modules:\n    raise ValueError('not in workers')"),
        400,
        "invalid_workflow",
        "ValueError: not in workers",
    ),
    "a class that cannot be loaded": (
        SOUND.replace("NAME", "from-start").replace("        pass", "        raise OSError('no such weights')"),
        400,
        "invalid_workflow",
        "OSError: no such weights",
    ),
    "the field of names": (
        SOUND.replace("NAME", "bad")
        .replace('"x"', '"model"')
        .replace("(self, x)", "(self, model)")
        .replace("2 * x", "1"),
        400,
        "invalid_workflow",
        "input 'model'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_named_and_changes_nothing(admin: httpx.Client, user: httpx.Client, what: str) -> None:
    text, status, code, told = REFUSED[what]
    before = served(user)
    answer = admin.post("/workflows", content=text)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert told in error["message"]
    assert served(user) == before
    assert run(user, "from-start", x=2) == {"y": 4}, "what it was to replace goes on"


def test_what_was_registered_at_the_start_is_replaced_and_deleted(admin: httpx.Client, user: httpx.Client) -> None:
    assert run(user, "from-start", x=2) == {"y": 4}
    register(admin, SOUND.replace("NAME", "from-start").replace("2 * x", "3 * x"))
    assert run(user, "from-start", x=2) == {"y": 6}
    assert admin.delete("/workflows/from-start").status_code == 200
    assert run(user, "from-start", x=2) == (404, "model_not_found")


def test_whatever_is_sent_is_registered_or_refused(admin: httpx.Client, user: httpx.Client) -> None:
    """Texts that end early, or have other bytes in places."""
    random, statuses = Random(3), set[int]()
    sound = SOUND.replace("NAME", "sent").encode()
    for _ in range(8):
        text = bytearray(sound[: random.randrange(len(sound))] if random.random() < 0.5 else sound)
        for _ in range(random.randrange(3)):
            text[random.randrange(len(text))] = random.randrange(256)
        answer = admin.post("/workflows", content=bytes(text))
        assert answer.status_code in (200, 400), answer.text
        statuses.add(answer.status_code)
    assert 400 in statuses
    for name in set(served(user)) - {"tiny/fill", "from-start", "kept"}:
        assert admin.delete(f"/workflows/{name}").status_code == 200


def test_no_request_is_lost_while_a_workflow_is_replaced_again_and_again(
    admin: httpx.Client, user: httpx.Client
) -> None:
    texts = [SOUND.replace("NAME", "busy").replace("2 * x", f"{factor} * x") for factor in (2, 3)]
    register(admin, texts[0])
    is_over = Event()

    def run_on() -> list[Any]:
        return [run(user, "busy", x=5) for _ in iter(is_over.is_set, True)]

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run_on) for _ in range(2)]
        for number in range(2):
            register(admin, texts[(number + 1) % 2])
        is_over.set()
        made = [each["y"] for several in running for each in several.result()]
    assert set(made) == {10, 15}
    assert run(user, "busy", x=5) == {"y": 10}
    assert admin.delete("/workflows/busy").status_code == 200


def test_a_class_whose_import_ends_workers_is_refused_and_others_go_on(
    server: ServerProcess, admin: httpx.Client, user: httpx.Client
) -> None:
    register(admin, SOUND.replace("NAME", "steady"))
    answer = admin.post(
        "/workflows", content=other_class("import os, sys\nif 'torch' in sys.modules:\n    os._exit(3)")
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "workflow_failed")
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert [run(user, "steady", x=8) for _ in range(2)] == [{"y": 16}] * 2
    assert "bad" not in served(user)


@pytest.mark.parametrize("key", [None, USER, "other"])
def test_only_an_admin_key_opens_them(server: ServerProcess, key: str | None) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for answer in (
        httpx.post(f"{server.base_url}/workflows", content=SOUND, headers=headers),
        httpx.delete(f"{server.base_url}/workflows/kept", headers=headers),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_admin_key_opens_nothing_else(admin: httpx.Client) -> None:
    assert admin.get("/models").status_code == 401


def test_admin_keys_are_read_again(server: ServerProcess, folder: Path) -> None:
    def delete(key: str) -> int:
        url = f"{server.base_url}/workflows/none"
        return httpx.delete(url, headers={"authorization": f"Bearer {key}"}).status_code

    assert (delete(ADMIN), delete("another")) == (404, 401)
    (folder / "admin.keys").write_text(f"{ADMIN}\nanother\n")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: delete("another") == 404)
    assert (delete(ADMIN), delete(USER)) == (404, 401)
