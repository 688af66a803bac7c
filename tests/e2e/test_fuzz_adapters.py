"""Hostile files that callers name as adapters: no process of a real server dies of one, and memory stays bounded.

make fuzz          a thousand and more
make test          a tenth of it
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from adapters import make_lora, make_peft_lora
from hostile_adapters import LAYER, hostile_adapters
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from served_edits import client_of, edit, serving
from server_process import ServerProcess

NUM_FILES = int(os.environ.get("FUZZ_REQUESTS", "600")) // 6
ANSWER_SECONDS = 20.0
GROWTH_BYTES = 400 * 1024**2
"""What all processes may take more at any time: files of some megabytes are read."""

NUMBERS = st.one_of(st.sampled_from([0, 1, 4, 64, 2**31, 2**53, 2**64, -1]), st.integers(0, 300))
NAMES = st.one_of(
    st.sampled_from([f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight", f"{LAYER}.alpha", "__metadata__", "x" * 600]),
    st.sampled_from(["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "base_model.model.x_embedder", ""]),
    st.sampled_from(["transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight", "text_encoder.x.lora_A.weight"]),
    st.text(max_size=20),
)
DTYPES = st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F32X", 3])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
PATTERNS = st.one_of(
    st.sampled_from(["x_embedder", "(a+)+$", ".*", "(", "x_embedder$", "^x", "\\", "(?:x|x)*y", ""]),
    st.text(max_size=8),
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """(a header, bytes of tensors that follow): often one whose tensors fit together."""
    entries: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(NAMES, max_size=4)):
        shape = draw(st.one_of(st.sampled_from([[4, 64], [64, 4], [], [1]]), st.lists(NUMBERS, max_size=3)))
        begin, end = end, end + min(int(np.prod(shape, dtype=object)) * 4, 2**40)
        entries[name] = {"dtype": draw(DTYPES), "shape": shape, "data_offsets": [begin, end]}
    if draw(st.booleans()):
        entries["__metadata__"] = draw(
            st.one_of(VALUES, st.builds(lambda told: {"lora_adapter_metadata": json.dumps(told)}, VALUES))
        )
    text = json.dumps(entries).encode("utf-8", "surrogatepass")
    length = draw(st.sampled_from([len(text)] * 8 + [0, 1, len(text) - 1, 10**8, 2**63, 2**64 - 1]))
    return struct.pack("<Q", max(0, length)) + text, max(0, end)


@st.composite
def files(draw: st.DrawFn, folder: Path, good: Path, checkpoint: Path) -> Path:
    """A file or folder in `folder`."""
    path = folder / f"{time.monotonic_ns()}.safetensors"
    match draw(st.sampled_from(["header", "header", "changed", "peft", "metadata"])):
        case "header":
            header, nbytes = draw(headers())
            path.write_bytes(header)
            os.truncate(path, len(header) + min(nbytes, 2**41))
        case "changed":
            content = bytearray(good.read_bytes())
            for _ in range(draw(st.integers(1, 4))):
                at = draw(st.integers(0, min(len(content), 3000) - 1))
                content[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
            path.write_bytes(content)
        case "peft":
            path = make_peft_lora(path.with_suffix(""), checkpoint, "x_embedder")
            known = {"r": VALUES, "lora_alpha": VALUES, "alpha_pattern": VALUES, "use_rslora": VALUES}
            known |= {"alpha_pattern": st.one_of(VALUES, st.dictionaries(PATTERNS, VALUES, max_size=3))}
            told = draw(st.one_of(st.fixed_dictionaries({}, optional=known), VALUES))
            (path / "adapter_config.json").write_text(json.dumps(told))
        case _:
            size = struct.unpack("<Q", (content := good.read_bytes())[:8])[0]
            entries = json.loads(content[8 : 8 + size])
            entries["__metadata__"] = {"lora_adapter_metadata": json.dumps(draw(VALUES))}
            text = json.dumps(entries).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return path


@pytest.fixture(scope="module")
def fuzzed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("server"), "--allow-runtime-lora") as server:
        yield server


def pids(server: ServerProcess) -> set[int]:
    return {child.pid for child in server.children()}


def memory(server: ServerProcess) -> int:
    """Bytes that all processes have of their own."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(each.memory_info().rss - each.memory_info().shared for each in processes)


def load(server: ServerProcess, path: Path) -> httpx.Response:
    body = {"lora_name": "fuzz", "lora_path": str(path)}
    return httpx.post(f"{server.base_url}/load_lora_adapter", json=body, timeout=ANSWER_SECONDS)


def test_no_file_harms_the_server(fuzzed: ServerProcess, tiny_checkpoint: Path, tmp_path: Path) -> None:
    good = make_lora(tmp_path / "good.safetensors", tiny_checkpoint, "x_embedder")
    with client_of(fuzzed) as client:
        before, _ = edit(client)
    statuses = Counter[int]()

    def check(path: Path) -> None:
        answer = load(fuzzed, path)
        statuses[answer.status_code] += 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert pids(fuzzed) == processes
        assert memory(fuzzed) - size < GROWTH_BYTES
        if answer.status_code == 200:
            unload = httpx.post(f"{fuzzed.base_url}/unload_lora_adapter", json={"lora_name": "fuzz"}, timeout=60)
            assert unload.status_code == 200

    check_all = hostile_adapters(tmp_path / "hostile", tiny_checkpoint)
    processes, size = pids(fuzzed), memory(fuzzed)
    check(good)
    for path, _ in check_all.values():
        check(path)

    @settings(
        max_examples=NUM_FILES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(files(tmp_path, good, tiny_checkpoint))
    def send(path: Path) -> None:
        check(path)

    send()
    print(
        f"\nadapters' files: {sum(statuses.values())}, by status {dict(statuses)}, {memory(fuzzed) - size} bytes more"
    )
    assert statuses[200] > 0
    assert statuses[400] > len(check_all) // 2
    with client_of(fuzzed) as client:
        after, _ = edit(client)
    np.testing.assert_array_equal(after, before)
    assert "Traceback" not in fuzzed.log.read_text()
