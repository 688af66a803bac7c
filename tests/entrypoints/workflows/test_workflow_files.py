"""Files of workflows are imported in processes that get nothing, may take little, and leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
from workflow_texts import SOUND

from core.errors import WorkflowError
from entrypoints.workflows.import_limits import MAX_DESCRIPTORS, ImportLimits
from entrypoints.workflows.import_messages import ImportAnswer, ImportOrder
from entrypoints.workflows.importer import import_text
from entrypoints.workflows.workflow_files import MAX_ANSWER, read_sent, read_workflows, registered_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "workflows"
TIGHT = ImportLimits(seconds=20.0, cpu_seconds=1, memory_bytes=300 * 1024 * 1024)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {process.pid for process in psutil.process_iter()}
    yield
    left = [process for process in psutil.process_iter(["cmdline", "ppid"]) if process.pid not in before]
    mine = [each for each in left if each.info["ppid"] in (os.getpid(), 1)]  # other tests import files meanwhile
    assert not [each for each in mine if "entrypoints.workflows.importer" in (each.info["cmdline"] or ())]


def refused(folder: Path, source: str, limits: ImportLimits = TIGHT) -> str:
    """What is said of a file."""
    file = folder / "hostile.py"
    file.write_text(source)
    with pytest.raises(WorkflowError) as caught:
        read_workflows([file], limits)
    assert str(caught.value).startswith(str(file))
    return str(caught.value).removeprefix(str(file))


def test_files_and_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("one", "two", "two-3"):
        (tmp_path / f"{name}.py").write_text(SOUND.replace("NAME", name))
    (tmp_path / "notes.txt").write_text("no Python")
    registered = read_workflows([tmp_path])
    assert [workflow.name for workflow in registered.workflows] == ["one", "two-3", "two"]
    assert [Path(each.file).stem for each in registered.classes] == ["one", "two-3", "two"]
    assert all("class Twice" in each.source and each.path.endswith(":Twice") for each in registered.classes)
    assert len({each.key for each in registered.classes}) == 3, "two texts are two classes"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("while True: pass", ": its import took more processor time than it may"),
        ("import time\ntime.sleep(60)", ": its import took longer than 1 s"),
        ("import os, time\nos.close(1), os.closerange(3, 99)\ntime.sleep(60)", ": its process closed its answer"),
        ("import os\nwhile True: os.fork()", ", line 2: PermissionError"),
        ("import subprocess\nsubprocess.run(['sleep', '60'])", ", line 2: PermissionError"),
        (
            "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()",
            ", line 2: PermissionError",
        ),
        ("import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})", ", line 2: PermissionError"),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", ", line 2: MemoryError"),
        ("import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 32))", ", line 3: OSError"),
        ("with open('/tmp/x', 'wb') as file:\n while True: file.write(bytes(1 << 20))", ""),
        ("kept = []\nwhile True: kept.append(open('/dev/null'))", ", line 2: OSError: [Errno 24]"),
        ("for _ in range(30): print('x' * 10**6)", ", it has no workflow"),
        ("import sys\nsys.exit(0)", ", line 2: SystemExit: 0"),
        ("import os\nos._exit(0)", ": its import ended its process: exit code 0"),
        ("import os\nos.kill(os.getpid(), 11)", ": its import ended its process: signal 11"),
        ("import ctypes\nctypes.string_at(0)", ": its import ended its process: signal 11"),
        ("def f(): f()\nf()", ", line 1: RecursionError"),
        ("class E(Exception):\n def __str__(self): raise E\nraise E", ", line 3: E"),
        ("raise ValueError('x' * 10**7)", ", line 1: ValueError: x"),
        ("raise ValueError('\\ud800')", ", line 1: ValueError"),
        ("x = ", ", SyntaxError: invalid syntax"),
        ("import no_such_module", ", line 1: ModuleNotFoundError"),
        ("x = '\\0'\n\0", ""),
        (
            "import os\nfor fd in range(3, 30):\n try: os.write(fd, b'x' * 100)\n except OSError: pass\nos._exit(0)",
            ": its import ended its process: exit code 0",
        ),
        (
            "import os\nfor fd in range(3, 30):\n try:\n"
            f"  while True: os.write(fd, bytes({MAX_ANSWER}))\n except OSError: pass",
            ": its process answered more than",
        ),
        (
            "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(60,)).start()",
            ", it has no workflow",
        ),
        ("import atexit, time\natexit.register(time.sleep, 60)", ", it has no workflow"),
    ],
)
def test_a_hostile_file_ends_within_its_limits(tmp_path: Path, source: str, why: str) -> None:
    limits = ImportLimits(1.0, 1, TIGHT.memory_bytes) if "sleep(60)" in source and "took longer" in why else TIGHT
    begun = time.monotonic()
    assert refused(tmp_path, source, limits).startswith(why)
    assert time.monotonic() - begun < 10


FORBIDDEN = """
socket.create_connection(("127.0.0.1", PORT))
socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
socket.socket(socket.AF_UNIX)
open("FOLDER/victim.txt", "a")
open("FOLDER/new.txt", "x")
os.truncate("FOLDER/victim.txt", 0)
os.remove("FOLDER/victim.txt")
os.rename("FOLDER/victim.txt", "FOLDER/other.txt")
os.symlink("FOLDER/victim.txt", "FOLDER/link")
os.mkdir("FOLDER/new")
os.mkdir(tempfile.gettempdir() + "/new")
os.kill(PARENT, 9)
open("/proc/PARENT/environ").read()
open("/proc/PARENT/mem", "rb").read(1)
"""


def test_an_import_reaches_no_network_and_no_other_process_and_writes_no_files(tmp_path: Path) -> None:
    """Scopes for signals are the newest of Landlock that this needs."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_long(0), 1) < 6:
        pytest.skip("this kernel has no Landlock, or an older one")
    (tmp_path / "victim.txt").write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        forbidden = FORBIDDEN.replace("PORT", str(listener.getsockname()[1])).replace("FOLDER", str(tmp_path))
        attempts = forbidden.replace("PARENT", str(os.getpid())).strip().splitlines()
        source = (
            "import os, socket, tempfile\ndone = []\n"
            f"for attempt in {attempts}:\n try: exec(attempt)\n except PermissionError: continue\n"
            " done.append(attempt)\nraise ValueError(done)"
        )
        assert refused(tmp_path, source) == ", line 7: ValueError: []"
    assert (tmp_path / "victim.txt").read_text() == "content"
    assert {path.name for path in tmp_path.iterdir()} == {"victim.txt", "hostile.py"}


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_RAW"])
def test_a_pair_of_sockets_reaches_nobody_else(tmp_path: Path, kind: str) -> None:
    """Those of datagrams could be connected to others by their path, which Landlock lets pass."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        others.bind(str(tmp_path / "socket"))
        others.setblocking(False)
        source = (
            f"import socket\nmine, _ = socket.socketpair(socket.AF_UNIX, socket.{kind})\n"
            f"mine.connect({str(tmp_path / 'socket')!r})\nmine.send(b'words')\n"
        )
        assert refused(tmp_path, source).startswith(", line 2: PermissionError")
        with pytest.raises(BlockingIOError):
            others.recv(8)


CHANGES = """
resource.prlimit(PARENT, resource.RLIMIT_CORE, LIMITS)
os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))
os.sched_setscheduler(PARENT, os.SCHED_OTHER, os.sched_param(0))
os.sched_setparam(PARENT, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))
os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0))
"""
"""Of another process; they would leave it as it is."""


def test_an_import_changes_no_other_process_but_may_change_itself(tmp_path: Path) -> None:
    limits = str(resource.getrlimit(resource.RLIMIT_CORE))
    attempts = CHANGES.replace("PARENT", str(os.getpid())).replace("LIMITS", limits).strip().splitlines()
    own = ["resource.prlimit(0, resource.RLIMIT_CORE)", "os.sched_setaffinity(0, os.sched_getaffinity(0))"]
    source = (
        "import os, resource\ndone = []\n"
        f"for number, attempt in enumerate({[*attempts, *own]}):\n"
        " try: exec(attempt)\n except PermissionError: continue\n"
        " done.append(number)\nraise ValueError(done)"
    )
    assert refused(tmp_path, source) == f", line 7: ValueError: [{len(attempts)}, {len(attempts) + 1}]"


def test_a_file_may_import_libraries_read_files_beside_it_and_write_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "name.txt").write_text("read")
    text = (
        "import asyncio, tempfile, numpy, torch, diffusers\nfrom pathlib import Path\n"
        "with tempfile.NamedTemporaryFile('w') as file: file.write('words')\n"
        "asyncio.run(asyncio.sleep(0))\nNAME = (Path(__file__).parent / 'name.txt').read_text()\n"
    )
    (tmp_path / "sound.py").write_text(text + SOUND.replace('"NAME"', "NAME"))
    (workflow,) = read_workflows([tmp_path / "sound.py"]).workflows
    assert workflow.name == "read"
    assert not list((tmp_path / "scratch").iterdir())


def test_an_import_gets_no_descriptors_and_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENCIL_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    ours = os.memfd_create("ours")
    os.set_inheritable(ours, True)
    source = (
        "import os, resource\n"
        "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]]\n"
        "raise ValueError(sorted(set(links)), sorted(os.environ), os.getsid(0) == os.getpid(), "
        "resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    try:
        said = refused(tmp_path, source)
    finally:
        os.close(ours)
    assert "memfd" not in said
    assert "secret" not in said
    assert "KEY" not in said
    assert "TOKEN" not in said
    assert f"True, ({MAX_DESCRIPTORS}, {MAX_DESCRIPTORS})" in said


def test_a_forged_answer_is_refused_or_sound() -> None:
    """Bytes of an answer in which some are others, and answers whose classes have impossible settings."""
    random, refusals = Random(6), Counter[str]()
    order = ImportOrder("made", "made.py", SOUND.replace("NAME", "made"), TIGHT)
    registered = import_text(order)
    data = msgspec.msgpack.encode(ImportAnswer(registered))
    assert registered_of(order, data, "").workflows == registered.workflows
    for _ in range(3000):
        forged = bytearray(data)
        for _ in range(random.choice([1, 1, 2, 8])):
            forged[random.randrange(len(forged))] = random.choice([0, 1, 0x80, 0x90, 0xC0, 0xFF, random.randrange(256)])
        try:
            registered_of(order, bytes(forged), "it is forged")
        except WorkflowError as error:
            refusals[str(error)] += 1
    assert refusals["made.py: it is forged"] > 500
    assert len(refusals) > 20, "graphs are checked"
    settings: dict[str, Any] = {"seconds": -1.0, "path": "no path", "source": "x" * (1 << 21), "dtype": "int3"}
    for name, value in settings.items():
        class_ = msgspec.to_builtins(registered.classes[0]) | {name: value}
        answer = {"registered": {"workflows": [], "classes": [class_]}}
        with pytest.raises(WorkflowError, match="it is forged"):
            registered_of(order, msgspec.msgpack.encode(answer), "it is forged")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: [Errno 2]"),
        (b"\xff\xfe", "cannot be read: 'utf-8'"),
        (b"#" * (1 << 21), "has more than"),
        (("é" * (1 << 21)).encode(), "has more than"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "hostile.py"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(WorkflowError, match=r"hostile\.py: ") as caught:
        read_workflows([file])
    assert why in str(caught.value)


def test_a_file_is_read_to_its_end_however_many_bytes_its_characters_have(tmp_path: Path) -> None:
    source = f"# {'é' * 600_000}\nraise RuntimeError('the end')"
    assert "line 2: RuntimeError: the end" in refused(tmp_path, source, ImportLimits())


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    assert "line 1: RuntimeError: the end" in refused(tmp_path, "\ufeffraise RuntimeError('the end')")


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"there is no \.py file in this folder"):
        read_workflows([tmp_path])


def test_a_file_cannot_have_as_many_nodes_as_it_likes(tmp_path: Path) -> None:
    many = "\n".join(
        f"w{index} = Workflow(name='w{index}')\nx = w{index}.add_input('x', int)\n"
        "for _ in range(900): x = Twice()(x)\n"
        f"w{index}.add_output(x, name='y')"
        for index in range(5)
    )
    assert "its workflows have 4501 nodes, and may have 4000" in refused(tmp_path, f"{SOUND}\n{many}", ImportLimits())


def test_two_files_cannot_have_workflows_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(SOUND.replace("NAME", "same"))
    with pytest.raises(WorkflowError, match="workflow same: two have this name"):
        read_workflows([tmp_path])


def test_what_the_page_shows_is_a_workflow(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "workflows.md"
    file = tmp_path / "safety.py"
    file.write_text(page.read_text().partition("```python\n")[2].partition("```")[0])
    assert [workflow.name for workflow in read_workflows([file]).workflows] == ["safety"]


def test_a_name_that_a_variant_needs_is_refused(tmp_path: Path) -> None:
    """Of a workflow of a model: where the mask is to be found, a node `segment` finds it."""
    file = tmp_path / "guarded.py"
    pictures = ', *(workflow.add_input(name, Image, required=False) for name in ("image", "mask")))'
    text = (EXAMPLES / "guarded.py").read_text().replace('("seed", int))', f'("seed", int){pictures}')
    file.write_text(text)
    read_workflows([file])
    file.write_text(text.replace("Safety", "Segment"))
    with pytest.raises(WorkflowError, match=f"{file}: .*two nodes are named segment"):
        read_workflows([file])


def test_an_error_of_the_graph_names_the_file(tmp_path: Path) -> None:
    said = refused(tmp_path, SOUND.replace('workflow.add_input("x", int)', '"words"'))
    assert "node twice, input x: its literal: it is a str" in said


async def test_a_text_is_imported_beside_the_event_loop(tmp_path: Path) -> None:
    """As a file is, but for its name in errors."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    other = asyncio.create_task(take_turns())
    registered = await read_sent(SOUND.replace("NAME", "sent"))
    assert [workflow.name for workflow in registered.workflows] == ["sent"]
    assert [each.file for each in registered.classes] == ["workflow.py"]
    assert turns > 10
    with pytest.raises(WorkflowError, match=r"^workflow\.py, line 2: ZeroDivisionError"):
        await read_sent("import os\n1 / 0")
    other.cancel()


async def test_an_import_ends_with_its_caller() -> None:
    importing = asyncio.create_task(read_sent("import time; time.sleep(100)"))
    await asyncio.sleep(0.3)
    importing.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await importing
    await asyncio.get_running_loop().shutdown_default_executor()  # waits for its thread, as a server's end does
    assert time.monotonic() - started < 5
