"""ImageEngine is robust: invalid arguments and failing processes give one clear error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import psutil
import pytest
from PIL import ExifTags, Image
from server_process import ROOT

from core.errors import EngineError, InvalidRequestError, StencilError
from core.messages.engine import Abort, Failed, Output
from core.messages.envelope import with_body
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditInput
from engine.client.upload import BytesUpload
from entrypoints import Edit, ImageEngine

EMPTY = Edit(prompt="a room", size=(64, 64))
FEW = SamplingParams(num_inference_steps=2, seed=1)
MASK = BytesUpload(b"a file that nobody opens")


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[ImageEngine]:
    with ImageEngine(str(tiny_checkpoint), dtype="float32", threads=1) as engine:
        yield engine


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pixels(engine: ImageEngine, edit: Edit, sampling: SamplingParams = FEW) -> Any:
    (result,) = engine.generate([edit], sampling, use_tqdm=False)
    if result.error is not None:
        raise result.error
    return np.asarray(result.images[0])


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_photo_is_turned_upright_opened_or_not(engine: ImageEngine, tmp_path: Path, orientation: int) -> None:
    path, exif = tmp_path / "photo.jpg", Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)).resize((96, 64))
    photo.save(path, exif=exif)
    upright = (64, 96) if orientation in (6, 8) else (96, 64)
    mask = np.zeros(upright[::-1], np.uint8)
    mask[:20, :20] = 255
    edit = Edit(prompt="x", image=path, mask_image=mask)
    with Image.open(path) as opened:
        assert np.array_equal(pixels(engine, edit), pixels(engine, replace(edit, image=opened)))


def test_numpy_values_work_like_pythons(engine: ImageEngine) -> None:
    numpy = SamplingParams(
        num_inference_steps=np.int64(2),  # type: ignore[arg-type]
        seed=np.uint32(1),  # type: ignore[arg-type]
        strength=np.float32(1),  # type: ignore[arg-type]
        mask_aware=np.bool_(True),  # type: ignore[arg-type]
    )
    assert numpy == FEW
    size = tuple(np.array([64, 64]))
    assert np.array_equal(pixels(engine, EMPTY), pixels(engine, replace(EMPTY, size=size), numpy))


@pytest.mark.parametrize(
    "arguments",
    [
        (EMPTY,),
        ("edits",),
        (3,),
        ([EMPTY, None],),
        ({EMPTY: 1},),
        ([EMPTY], 3),
        ([EMPTY], [FEW, FEW]),
        ([EMPTY], [None]),
        ([EMPTY], "x"),
        ([EMPTY], {"seed": 1}),
    ],
)
def test_invalid_arguments_are_refused(engine: ImageEngine, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(*arguments, use_tqdm=False)
    assert str(caught.value.param).startswith(("edits", "sampling_params"))


@pytest.mark.parametrize(("image", "lora"), [(3, ""), (None, ""), (np.zeros((8, 8, 3), np.uint8), 3), ("a\0b", "")])
def test_a_template_without_an_image_is_refused(engine: ImageEngine, image: Any, lora: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.create_template(image, lora=lora)
    assert caught.value.param == ("lora" if lora else "image")


BROKEN = {
    "cannot be encoded": EditInput(prompt=np.str_("x"), sampling=FEW, canvas_size=(64, 64)),
    "the engine cannot decode": EditInput(prompt=b"x", sampling=FEW, canvas_size=(64, 64)),  # type: ignore[arg-type]
    "an image processor cannot decode": EditInput(
        prompt="x",
        sampling=FEW,
        mask=MASK,
        canvas_size=(64.0, 64),  # type: ignore[arg-type]
    ),
    "an image processor is not sent": EditInput(prompt="x", sampling=FEW, mask=MASK, canvas_size=(np.int64(64), 64)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_message_fails_only_its_own_edit_and_leaves_no_trace(engine: ImageEngine, name: str) -> None:
    """A message that validation should never let through does not affect other edits, and no state of it is left."""
    before, inner = processes(), engine._engine

    async def broken() -> list[object]:
        async with inner.edit(f"broken-{name}", BROKEN[name], inner.choose_model()) as outputs:
            return [output async for output in outputs]

    errors: list[BaseException] = []

    def send() -> None:
        try:
            engine._run(broken())
        except (EngineError, InvalidRequestError) as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    results = engine.generate([EMPTY] * 6, SamplingParams(num_inference_steps=8, seed=1), use_tqdm=False)
    thread.join()
    assert [result.error for result in results] == [None] * 6
    assert len(errors) == 1
    assert processes() == before, "no process has ended"
    deadline = time.monotonic() + 30
    while inner.num_admitted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    waiters = inner.services.engines.replicas[0]._client._waiters
    assert not [name for name in (*inner.services.router._placements, *waiters) if not name.startswith("capture-")]
    inner.services.arena.check_integrity()


def test_bytes_that_are_no_message_do_not_end_the_engine(engine: ImageEngine) -> None:
    before, client = processes(), engine._engine.services.engines.replicas[0]._client
    heard: list[Output] = []

    async def send() -> None:
        client._waiters["lost"] = heard.append
        no_request = msgspec.msgpack.encode({"type": "EngineRequest", "request_id": "lost", "model": 3})
        for body in (b"nonsense", no_request):
            client._send_bytes(with_body(client._sealed(Abort(())), body))

    engine._run(send())
    deadline = time.monotonic() + 30
    while not heard:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(heard[0], Failed)
    pixels(engine, EMPTY)
    assert processes() == before


def test_a_broken_message_that_waited_for_an_engine_fails_when_one_is_up(engine: ImageEngine) -> None:
    inner = engine._engine
    running = psutil.Process().children(recursive=True)
    next(child for child in running if "stencil-engine-0" in child.cmdline()).kill()

    async def broken() -> list[object]:
        while inner.services.engines.is_ready:
            await asyncio.sleep(0.001)
        async with inner.edit("waited", BROKEN["cannot be encoded"], inner.choose_model()) as outputs:
            return [output async for output in outputs]

    with pytest.raises(EngineError, match="cannot be encoded"):
        engine._run(broken())
    pixels(engine, EMPTY)


def test_a_closed_engine_says_so(tiny_checkpoint: Path) -> None:
    engine = ImageEngine(str(tiny_checkpoint), threads=1)
    engine.close()
    engine.close()
    for call in (lambda: engine.generate([EMPTY]), lambda: engine.create_template(np.zeros((32, 32, 3), np.uint8))):
        with pytest.raises(EngineError, match="this ImageEngine is closed; make another one"):
            call()


def test_closing_while_another_thread_generates_ends_its_call(tiny_checkpoint: Path) -> None:
    engine = ImageEngine(str(tiny_checkpoint), threads=1)
    errors: list[object] = []
    slow = SamplingParams(num_inference_steps=200, n=4, seed=1)

    def generate() -> None:
        errors.extend(result.error for result in engine.generate([EMPTY] * 80, slow, use_tqdm=False))

    thread = threading.Thread(target=generate)
    thread.start()
    while not engine._engine.num_requests_running:
        time.sleep(0.01)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 80
    assert all(error is None or isinstance(error, StencilError) for error in errors)
    assert errors[-1] is not None


LIMITED = """
import resource, sys
limit, nbytes, program = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
import os
resource.setrlimit(getattr(resource, limit), (nbytes, nbytes))
os.execv(sys.executable, [sys.executable, "-m", *program])
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_in_a_forked_child_there_is_an_error_at_once(engine: ImageEngine, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn, since this process has threads
        child = os.fork()
    if child == 0:
        _use_in_child(engine)
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    told = capfd.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert len(lines) == 2
    assert all("belongs to process" in line and "make one in each process" in line for line in lines)
    pixels(engine, EMPTY)


def _use_in_child(engine: ImageEngine) -> NoReturn:
    """Print what the engine says to each call; an exit status of 0 says that it has not hung."""
    signal.alarm(20)
    try:
        for call in (lambda: engine.generate([EMPTY], use_tqdm=False), engine.close):
            try:
                call()
            except EngineError as error:
                print(error, flush=True)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("command", ["edit", "serve"])
@pytest.mark.parametrize(("limit", "nbytes"), [("RLIMIT_AS", 3 * 2**30), ("RLIMIT_FSIZE", 2**20)])
def test_resource_limits_that_are_too_low_are_one_line(
    tiny_checkpoint: Path, tmp_path: Path, command: str, limit: str, nbytes: int
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "in.png")
    arguments = {
        "edit": [str(tmp_path / "in.png"), "--prompt", "x", "-o", str(tmp_path / "out.png")],
        "serve": ["--port", "0"],
    }
    program = [f"entrypoints.{command}", *arguments[command], "--model", str(tiny_checkpoint)]
    result = run_python(LIMITED, limit, str(nbytes), *program)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert {"RLIMIT_AS": "ulimit -v", "RLIMIT_FSIZE": "ulimit -f"}[limit] in line
