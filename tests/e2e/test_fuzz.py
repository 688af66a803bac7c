"""Hostile requests to a real server: none crashes it, makes it answer 500 or leaks memory.

    make fuzz          5000 and more, then every operation of our OpenAPI description by schemathesis
    make test          as many as fit into a minute

Every request's prompt is SECRET, which must not appear in any log.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from hostile_files import BOMBS, bombs, picture
from hostile_requests import (
    BOUNDARY,
    CONTROLLED,
    SECRET,
    SMALL,
    Request,
    controlled_requests,
    hostile_requests,
    joined,
    part,
    request,
    text_parts,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pictures import alpha_mask, encode, photo
from server_process import ServerProcess, start

from tools.random_controlnets import make_sd_controlnet
from tools.random_unet_checkpoints import make_sd

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "600"))
AT_ONCE = 6
ANSWER_SECONDS = 60.0
WARM_SHARE = 0.25
"""Of the requests: until then memory may grow, as pools fill and code is loaded."""
GROWTH_BYTES = 24 * 1024 * 1024
"""What all processes may grow by, together, after that. An allocator's pools still fill a little; a leak of 20 kB a
request would show in `make fuzz`."""
DEEP_CODES = (
    "invalid_multipart",
    "invalid_json",
    "invalid_type",
    "invalid_image_file",
    "invalid_value",
)
"""What must be among the refusals, as a sign that requests come far."""
STEADY = {"prompt": "a red hat", "seed": "7"}
CATALOG = """
[controlnets]
edges = "edges"
depth = "depth"

[[model]]
name = "tiny/fill"
path = "{tiny}"

[[model]]
name = "{controlled}"
path = "sd"
controlnets = ["edges", "depth"]
"""


@dataclass(frozen=True)
class Answer:
    """status: "closed" where the connection was closed without one."""

    status: str
    code: str
    text: str


@dataclass
class Tally:
    """Results of the requests. memory: (requests so far, seconds, process -> bytes)."""

    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, Counter[str]]] = field(default_factory=list)
    failures: list[tuple[Request, Answer]] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.statuses.total()

    def summary(self) -> str:
        (_, begin, before), (_, end, after) = self.memory[0], self.memory[-1]
        warm = self.warm()
        lines = [
            f"requests      {self.num_requests} in {end - begin:.0f} s, {self.num_bad} of them bad",
            "statuses      " + ", ".join(f"{status} {count}" for status, count in sorted(self.statuses.items())),
            "codes         " + ", ".join(f"{code} {count}" for code, count in self.codes.most_common()),
            f"memory (MiB)  {_mib(before.total())} before, {_mib(warm[2].total())} warm, {_mib(after.total())} after",
            *(
                f"  {name:<11} {_mib(before[name])}, {_mib(warm[2][name])}, {_mib(after[name])}"
                for name in sorted(after)
            ),
            f"slope         {self.growth / 2**10 / max(1, self.num_requests - warm[0]):.2f} KiB a request when warm",
        ]
        return "\n".join(lines)

    @property
    def num_bad(self) -> int:
        return self.num_requests - self.statuses["200"]

    def warm(self) -> tuple[int, float, Counter[str]]:
        return next(one for one in self.memory if one[0] >= WARM_SHARE * self.num_requests)

    @property
    def growth(self) -> int:
        return self.memory[-1][2].total() - self.warm()[2].total()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


@pytest.fixture(scope="module")
def fuzzed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with small limits, so that requests reach them, and a second model, which has ControlNets. Asserts that
    it leaves no process and no file."""
    folder = tmp_path_factory.mktemp("models")
    make_sd(folder / "sd", native_size=64)
    for seed, name in enumerate(("edges", "depth")):
        make_sd_controlnet(folder / name, seed=seed)
    catalog = folder / "models.toml"
    catalog.write_text(CATALOG.format(tiny=tiny_checkpoint, controlled=CONTROLLED))
    flags = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32")
    flags += ("--max-queue", "16", "--max-upload-bytes", "3000000", "--max-pixels", "4000000", "--log-format", "json")
    cache = ("--template-bytes", "300K", "--cache-host-bytes", "4M")
    server = start(tmp_path_factory.mktemp("server") / "scratch", *flags, *cache)
    yield server
    assert server.stop() == 0, server.log.read_text()


def send(server: ServerProcess, request: Request) -> Answer:
    """Send bytes; returns everything that the server sends before it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as client:
        try:
            client.sendall(request.data)
            if not request.is_whole:
                with contextlib.suppress(OSError):  # the server may have closed it already
                    client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                said += piece
        except TimeoutError:
            return Answer("none", "", f"no answer in {ANSWER_SECONDS} s")
        except ConnectionError:  # what it said before it closed may be lost
            pass
    return read_answer(said)


def read_answer(said: bytes) -> Answer:
    head, _, body = said.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Answer("closed", "", "")
    status = head[9:12].decode()
    code = ""
    if status >= "400" and body:
        error = json.loads(body.partition(b"HTTP/1.1 ")[0] if b"content-length" in head else body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        code = str(error["code"])
    return Answer(status, code, said[:2000].decode(errors="replace"))


def is_good(answer: Answer, request: Request) -> bool:
    """Whether the server answered, without 5xx other than 503, and 504 for requests with a timeout."""
    if answer.status == "closed":
        return not request.is_whole
    is_timeout = (answer.status, answer.code) == ("504", "deadline_exceeded") and b"timeout" in request.data
    return answer.status == "200" or "400" <= answer.status < "500" or answer.status == "503" or is_timeout


def memory_of(server: ServerProcess) -> Counter[str]:
    """Process -> its PSS, which counts shared memory once."""
    memory = Counter(api=psutil.Process(server.process.pid).memory_full_info().pss)
    for child in server.children():
        name = next((word for word in child.cmdline() if word.startswith("stencil-")), "other")
        memory[name.removeprefix("stencil-")] += child.memory_full_info().pss
    return memory


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while any(httpx.get(f"{server.base_url}/engine/stats").json()["queue"][name] for name in ("admitted", "running")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steady_picture(server: ServerProcess) -> str:
    files = {"image": encode(photo()), "mask": alpha_mask()}
    answer = httpx.post(f"{server.base_url}/images/edits", data=STEADY, files=files, timeout=60)
    assert answer.status_code == 200, answer.text
    picture: str = answer.json()["data"][0]["b64_json"]
    return picture


def fuzz(server: ServerProcess, num_requests: int, strategy: st.SearchStrategy[Request] = hostile_requests) -> Tally:
    """Send this many requests. They are not shrunk, since the server's behaviour may depend on earlier ones."""
    tally, threads = Tally(), ThreadPoolExecutor(AT_ONCE)

    @settings(
        max_examples=num_requests // AT_ONCE + 1,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(requests: list[Request]) -> None:
        for one, answer in zip(requests, threads.map(lambda one: send(server, one), requests), strict=True):
            tally.statuses[answer.status] += 1
            tally.codes[answer.code] += bool(answer.code)
            if not is_good(answer, one):
                tally.failures.append((one, answer))
        if tally.num_requests // 120 >= len(tally.memory):
            tally.memory.append((tally.num_requests, time.monotonic(), memory_of(server)))

    with threads:
        tally.memory.append((0, time.monotonic(), memory_of(server)))
        run()
    wait_until_idle(server)
    tally.memory.append((tally.num_requests, time.monotonic(), memory_of(server)))
    return tally


def test_hostile_requests_are_answered_and_change_nothing(fuzzed: ServerProcess) -> None:
    expected, pids = steady_picture(fuzzed), {child.pid for child in fuzzed.children()}
    process = psutil.Process(fuzzed.process.pid)
    wait_until_idle(fuzzed)
    num_fds = process.num_fds()
    tally = fuzz(fuzzed, NUM_REQUESTS)
    print("\n" + tally.summary())
    assert not tally.failures, tally.failures[:3]
    assert tally.num_bad >= 0.8 * NUM_REQUESTS
    if NUM_REQUESTS >= 5000:  # fewer requests may not include all of them
        assert {"200", "400", "404", "405", "413", "415"} <= set(tally.statuses), "the strategies have lost their reach"
        assert set(DEEP_CODES) <= set(tally.codes), "the strategies have lost their reach"
    assert httpx.get(f"{fuzzed.url}/health").json()["status"] == "ok"
    assert steady_picture(fuzzed) == expected
    wait_until_idle(fuzzed)
    assert {child.pid for child in fuzzed.children()} == pids, "a process has died"
    assert process.num_fds() <= num_fds + 4
    wait_until_empty(process)
    assert tally.growth <= GROWTH_BYTES


def test_hostile_control_pictures_are_answered_and_change_nothing(fuzzed: ServerProcess) -> None:
    expected, pids = steady_picture(fuzzed), {child.pid for child in fuzzed.children()}
    tally = fuzz(fuzzed, NUM_REQUESTS // 10, controlled_requests)
    print("\n" + tally.summary())
    assert not tally.failures, tally.failures[:3]
    assert {"200", "400"} <= set(tally.statuses), "the strategies have lost their reach"
    assert steady_picture(fuzzed) == expected
    wait_until_idle(fuzzed)
    assert {child.pid for child in fuzzed.children()} == pids, "a process has died"
    wait_until_empty(psutil.Process(fuzzed.process.pid))


def wait_until_empty(process: psutil.Process) -> None:
    """Wait until no shared memory of requests is left: an engine is idle a moment before its last one is freed."""
    deadline = time.monotonic() + 10
    while left := sum(
        area.rss for area in process.memory_maps(grouped=True) if area.path.startswith("/memfd:stencil-arena-0")
    ):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(fuzzed: ServerProcess, name: str) -> None:
    """Files that would fill memory, sent as image, as mask and as control picture in every form."""
    before = max(peak_bytes(child) for child in fuzzed.children())
    data = bombs()[name]
    good = picture("png")
    forms = [{"image": data}, {"image": good, "mask": data}, {"image": good, "mask_image": data}]
    forms.append({"image": good, "control_image": data})
    for files in forms:
        fields = SMALL | ({"model": CONTROLLED, "control_type": "edges"} if "control_image" in files else {})
        parts = text_parts(fields) + [part(field, content, "a.png") for field, content in files.items()]
        answer = send(fuzzed, form_request("/v1/images/edits", parts))
        assert answer.status in ("200", "400"), answer
    answer = send(fuzzed, form_request("/v1/templates", [part("image", data, "a.png")]))
    assert answer.status in ("200", "400"), answer
    assert max(peak_bytes(child) for child in fuzzed.children()) - before < 150 * 2**20


def form_request(path: str, parts: list[bytes]) -> Request:
    return request(
        "POST", path, [("content-type", f"multipart/form-data; boundary={BOUNDARY.decode()}")], joined(parts)
    )


def peak_bytes(process: psutil.Process) -> int:
    """The highest memory use so far."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return 0


SCHEMATHESIS = """
generation.max-examples = {examples}
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", 503, 504]
"""


def test_our_own_openapi_description(fuzzed: ServerProcess, tmp_path: Path) -> None:
    """Schemathesis generates requests that fit the description, and requests that do not."""
    settings_file = tmp_path / "schemathesis.toml"
    settings_file.write_text(SCHEMATHESIS.format(examples=max(5, NUM_REQUESTS // 100)))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings_file), "run"]
    phases = "coverage,fuzzing" if NUM_REQUESTS >= 5000 else "fuzzing"
    options = ["--checks", "not_a_server_error", "--mode", "all", "--phases", phases, "--no-color"]
    answer = subprocess.run(
        [*command, f"{fuzzed.url}/openapi.json", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=tmp_path,
    )
    print("\n" + answer.stdout[-1500:])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert httpx.get(f"{fuzzed.url}/health").json()["status"] == "ok"


def test_the_log_of_all_this(fuzzed: ServerProcess) -> None:
    """No traceback, no prompt; a request id on every line about a request."""
    lines = [json.loads(line) for line in fuzzed.log.read_text().splitlines()]
    assert len([line for line in lines if line["logger"] == "stencil.access"]) > NUM_REQUESTS / 2
    assert not [line for line in lines if "exception" in line or line["level"] in ("error", "critical")]
    assert not [line for line in lines if SECRET in json.dumps(line)]
    assert all(line["request_id"].startswith("req_") for line in lines if line["logger"] == "stencil.access")
