"""The server as a process: how it starts, refuses to start, drains and ends, without leaving anything behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_hub import REPO, hub
from forked_server import ForkedServer
from pictures import alpha_mask, encode, photo
from server_process import ROOT, ServerProcess, fork, spawn, spawn_forked, start, wait_until_ready

from engine.router.engine_replica import MAX_RESTARTS

LONG_EDIT = {"prompt": "p", "num_inference_steps": "200"}
FILES = {"image": encode(photo()), "mask": alpha_mask()}


def post(server: ServerProcess, fields: dict[str, str] = LONG_EDIT) -> httpx.Response:
    return httpx.post(f"{server.base_url}/images/edits", data=fields, files=FILES, timeout=60)


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; its result or exception is put into the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except httpx.HTTPError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(server: ServerProcess) -> bool:
    return "stencil:num_requests_running 1.0" in httpx.get(f"{server.url}/metrics").text


def run_to_its_end(
    tmp_path: Path,
    *flags: str,
    scratch: str = "scratch",
    begin: Callable[..., subprocess.Popen[str] | ForkedServer] = spawn,
) -> tuple[int, str]:
    """Exit status and stderr of a server that should exit by itself."""
    process = begin(tmp_path / scratch, *flags)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read() == ""
    status = process.wait(60)
    assert not list((tmp_path / scratch).iterdir())
    return status, (tmp_path / scratch).with_suffix(".log").read_text()


# --------------------------------------------------------------------------------------------------------- endings


def test_sigterm_lets_running_edits_finish(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    server = start(tmp_path / "scratch", *server_flags)
    thread, results = in_background(lambda: post(server))
    wait_for(lambda: is_running(server))
    children = server.children()
    server.process.terminate()
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    refused = post(server)  # new ones are sent away, to another replica
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert "retry-after" in refused.headers
    assert httpx.get(f"{server.url}/health").status_code == 200
    thread.join()
    finished = time.monotonic()
    assert results[0].status_code == 200
    assert server.wait(children) == 0
    assert time.monotonic() - finished < 10


def test_drain_limit_then_an_answer(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    """An edit that is not done within --drain-seconds fails with an answer."""
    server = fork(tmp_path / "scratch", *server_flags, "--drain-seconds", "0.1", "--max-num-seqs", "1")
    background = [in_background(lambda: post(server, LONG_EDIT | {"n": "10"})) for _ in range(2)]
    wait_for(lambda: is_running(server))
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 10
    for thread, results in background:
        thread.join()
        assert (results[0].status_code, results[0].json()["error"]["code"]) == (503, "server_is_overloaded")
        assert "retry-after" in results[0].headers


def test_uploads_in_the_pipeline_get_503_when_the_drain_is_over(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    """Those that wait for an image processor, those that one has, and those that are computed."""
    server = fork(tmp_path / "scratch", *server_flags, "--drain-seconds", "0.5")
    files = {"image": encode(photo(2000, 2000)), "mask": alpha_mask(2000, 2000)}
    answered: list[tuple[float, httpx.Response]] = []

    def post_large() -> None:
        answer = httpx.post(f"{server.base_url}/images/edits", data=LONG_EDIT, files=files, timeout=60)
        answered.append((time.monotonic(), answer))

    def all_are_admitted() -> bool:
        queue = httpx.get(f"{server.base_url}/engine/stats").json()["queue"]
        return bool(queue["running"] + queue["waiting"] == len(threads))

    threads = [threading.Thread(target=post_large) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_for(all_are_admitted)
    stopped = time.monotonic()
    assert server.stop() == 0
    for thread in threads:
        thread.join()
    refused = [answer for _, answer in answered if answer.status_code != 200]
    assert len(answered) == len(threads) > 2 * (len(answered) - len(refused))
    assert {(answer.status_code, answer.headers.get("retry-after")) for answer in refused} == {(503, "1")}
    assert max(at for at, _ in answered) - stopped < 3.5
    assert "Traceback" not in server.log.read_text()


def test_second_ctrl_c_does_not_wait(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    server = fork(tmp_path / "scratch", *server_flags, "--max-num-seqs", "1")
    thread, _ = in_background(lambda: post(server, LONG_EDIT | {"n": "10"}))
    wait_for(lambda: is_running(server))
    children = server.children()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.wait(children) == 0
    assert time.monotonic() - started < 8
    thread.join()


def kill_engine(server: ServerProcess, killed: set[int]) -> list[psutil.Process]:
    """Wait for an engine that was not killed before, and kill it. Returns all children at that time."""

    def living() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [c for c in server.children() if "stencil-engine-0" in c.cmdline() and c.pid not in killed]
        return []

    wait_for(lambda: bool(living()))
    children, (engine,) = server.children(), living()
    killed.add(engine.pid)
    engine.kill()
    return children


def test_a_dead_engine_is_restarted_and_one_that_keeps_dying_ends_the_server(
    server_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """In the end there is an exit status for the supervisor, and one line for the operator."""
    server = fork(tmp_path / "scratch", *server_flags)
    killed: set[int] = set()
    kill_engine(server, killed)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 200
    (engine,) = health.json()["engines"]
    assert (health.json()["status"], engine["alive"], engine["state"]) == ("degraded", False, "restarting")
    refused = httpx.post(f"{server.url}/v1/images/edits")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    wait_until_ready(server.url)
    assert 'stencil:engine_restarts_total{engine="0"} 1.0' in httpx.get(f"{server.url}/metrics").text
    for _ in range(MAX_RESTARTS):
        children = kill_engine(server, killed)
    assert server.wait(children) == 1
    assert "stencil: error: " in server.log.read_text()


# --------------------------------------------------------------------------------------------------------- starts


def test_alive_before_the_model_is_loaded_and_stops_while_it_loads(
    server_flags: tuple[str, ...], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = spawn(tmp_path / "scratch", *server_flags, "--port", str(port))
    url = f"http://127.0.0.1:{port}"

    def is_alive() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    wait_for(is_alive)
    ready = httpx.get(f"{url}/ready")
    assert (ready.status_code, ready.json()["error"]["type"]) == (503, "service_unavailable_error")
    assert httpx.get(f"{url}/v1/models").headers["retry-after"]
    children = psutil.Process(process.pid).children(recursive=True)
    server = ServerProcess(process, url, tmp_path / "scratch.log", tmp_path / "scratch")
    process.terminate()
    assert server.wait(children) == 0


def test_sigterm_is_handled_from_the_first_moment_on(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    """The kernel delivers to the first process of a container only signals that have a handler."""
    process = spawn(tmp_path / "scratch", *server_flags)
    status = Path(f"/proc/{process.pid}/status")
    caught = 1 << (signal.SIGTERM - 1)
    wait_for(lambda: bool(int(status.read_text().split("SigCgt:")[1].split()[0], 16) & caught))
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) in ((128 + signal.SIGTERM, ""), (0, "")), "0: it had begun to start its processes"
    assert not list((tmp_path / "scratch").iterdir())


def assert_one_line(result: tuple[int, str], status: int, *words: str) -> None:
    assert result[0] == status, result[1]
    assert result[1].startswith("stencil: error: "), result[1]
    assert result[1].count("\n") == 1, result[1]
    for word in words:
        assert word in result[1]


def test_port_in_use(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_to_its_end(tmp_path, *server_flags, "--port", port, begin=spawn_forked)
    assert_one_line(result, 1, port, "Address already in use")


def test_unknown_host(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*server_flags, "--host", "no.such.host.invalid")
    assert_one_line(run_to_its_end(tmp_path, *flags, begin=spawn_forked), 1, "no.such.host.invalid")


def test_host_that_is_no_valid_name(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    assert_one_line(
        run_to_its_end(tmp_path, *server_flags, "--host", "a" * 64, begin=spawn_forked), 1, "a" * 64, "--host"
    )


def test_temporary_folder_too_deep_for_a_socket(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    assert_one_line(run_to_its_end(tmp_path, *server_flags, scratch="x" * 110, begin=spawn_forked), 1, "TMPDIR")


def test_names_with_line_breaks_forge_no_line(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    server = fork(tmp_path / "scratch", *server_flags, "--served-model-name", "x\nforged", "--allow-runtime-lora")
    body = {"lora_name": "hat", "lora_path": "/no\nforged\x1b[2K"}
    answer = httpx.post(f"{server.base_url}/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 400
    assert server.stop() == 0
    lines = server.log.read_text().splitlines()
    assert any("adapter hat was not loaded" in line for line in lines)
    assert not any(line.startswith("forged") or "\x1b" in line for line in lines)


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    assert_one_line(run_to_its_end(tmp_path, "--model", "/no/such/dir", begin=spawn_forked), 1, "/no/such/dir")


def test_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_one_line(
        run_to_its_end(tmp_path, "--model", str(tmp_path / "empty"), begin=spawn_forked), 1, "model_index.json"
    )


def test_broken_checkpoint_fails_while_loading(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Only the worker finds the error; its message, one of those in tests/model_executor, reaches stderr through the
    engine, and all processes exit.
    """
    torn = Path(shutil.copytree(tiny_checkpoint, tmp_path / "torn"))
    shutil.rmtree(torn / "transformer")
    assert_one_line(
        run_to_its_end(tmp_path, "--model", str(torn), begin=spawn_forked), 1, "torn lacks transformer", "complete?"
    )


def test_a_hub_that_is_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker contacts it, with the environment variables that the server was started with."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(None, "GatedRepo") as (url, _):
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert_one_line(run_to_its_end(tmp_path, "--model", REPO), 1, f"{REPO} is gated", "HF_TOKEN")


def test_bad_flag_and_help(tmp_path: Path) -> None:
    assert_one_line(run_to_its_end(tmp_path, "--dtype", "int8"), 2, "--dtype")
    command = [sys.executable, "-m", "entrypoints.serve", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for flag in ("--model", "--api-key", "--max-queue", "--drain-seconds", "--workers-per-engine"):
        assert flag in result.stdout


def test_weights_of_a_cpu_are_in_host_memory_already(tmp_path: Path) -> None:
    refused = run_to_its_end(tmp_path, "--device", "cpu", "--offload", "host", begin=spawn_forked)
    assert_one_line(refused, 1, "--offload host", "on a CPU all weights are in host memory anyway")


def test_files_that_flags_name_may_be_pipes() -> None:
    """They can be read once. With these flags the server fails only when it listens, after it has read them."""
    reader, writer = os.pipe()
    os.write(writer, b'[[model]]\nname = "piped"\n')
    os.close(writer)
    flags = ("--api-key-file", "/dev/stdin", "--catalog", f"/dev/fd/{reader}", "--host", "no.such.host.invalid")
    command = [sys.executable, "-m", "entrypoints.serve", *flags]
    with os.fdopen(reader):
        result = subprocess.run(
            command, cwd=ROOT, input="a-key", capture_output=True, text=True, check=False, pass_fds=[reader], timeout=60
        )
    assert_one_line((result.returncode, result.stderr), 1, "no.such.host.invalid")


# --------------------------------------------------------------------------------------------------------- idle


def test_idle_costs_nothing(server: ServerProcess) -> None:
    """All processes together use at most 1 % of a core while there are no requests."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    time.sleep(1.0)  # what the last test left behind

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, started = cpu_seconds(), time.monotonic()
    time.sleep(5.0)
    assert (cpu_seconds() - before) / (time.monotonic() - started) <= 0.01


def test_no_process_of_one_machine_loads_ray(server: ServerProcess) -> None:
    for process in (psutil.Process(server.process.pid), *server.children()):
        # Not all of Ray's folder: where a test has imported Ray, the server inherits a path with a psutil of Ray's.
        assert not [area.path for area in process.memory_maps() if "/ray/_raylet" in area.path], process.name()
