"""A step that runs out of memory frees what it computed before the next attempt, and the error is named."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from diffusers import FluxFillPipeline
from edits import Edit
from pipeline_rig import Rig

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from core.memory_budget import CPU_REMEDIES
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import Row
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.probes.memory_probe import room_for


@pytest.fixture(scope="module")
def rig(tiny_checkpoint: Path) -> Iterator[Rig]:
    arena = Arena.create(0, 1 << 25)
    yield Rig(tiny_checkpoint, arena, FluxFillPipeline)
    arena.close()


class SmallDevice:
    """A family's forward pass on a device with room for a limited number of rows. tensors: those that each attempt
    allocated.
    """

    def __init__(self, rig: Rig, room: int) -> None:
        self._predict, self._room = rig.family.predict, room
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.sizes: list[int] = []

    def predict(self, rows: Sequence[Row], group: None) -> list[torch.Tensor]:
        assert all(tensor() is None for tensor in self.tensors), "the attempt before holds on to memory"
        predictions = self._predict(rows)
        self.sizes.append(len(rows))
        if len(rows) > self._room:
            self.tensors += [weakref.ref(tensor) for tensor in predictions]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return predictions


def begun(rig: Rig, number: int) -> list[Edit]:
    edits = [rig.edit(f"edit-{seed}", seed=seed, steps=2, size=(64, 64)) for seed in range(number)]
    for edit in edits:
        rig.do(edit.encode_plan())
    return edits


def test_a_step_is_halved_until_it_fits_and_paints_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [rig.run(rig.edit("alone", seed=seed, steps=2, size=(64, 64))) for seed in range(5)]
    device = SmallDevice(rig, room=2)
    monkeypatch.setattr(rig.family, "predict", device.predict)
    edits = begun(rig, 5)
    for step in range(2):
        result = rig.runner.run(Edit.denoise_batch(edits, dict.fromkeys(edits, step)))
        assert [item.failure for item in result.items] == [None] * 5
        assert result.num_parts == 3
    assert device.sizes == [5, 2, 3, 1, 2] * 2
    assert device.tensors, "something was there to be given back"
    for edit, expected in zip(edits, alone, strict=True):
        rig.do(edit.decode_plan())
        difference = abs(edit.result().astype(int) - expected)
        assert difference.max() <= 1
        assert (difference == 0).mean() > 0.999


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_errors_of_libraries_without_memory_are_recognised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def predict(rows: Sequence[Row], group: None) -> list[torch.Tensor]:
        raise RuntimeError(words)

    (edit,) = begun(rig, 1)
    monkeypatch.setattr(rig.family, "predict", predict)
    (item,) = rig.runner.run(edit.denoise_plan(0).batches[0]).items
    assert item.failure is not None
    assert item.failure.kind == "out_of_memory"
    rig.store.free(edit.key("", ""))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 22.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA driver error: out of memory"),
        MemoryError(),
    ],
)
def test_a_model_that_does_not_fit_is_no_broken_checkpoint(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelCheckpoint, "_load_module", load)
    models = ResidentModels.open([ModelConfig(model=str(tiny_checkpoint), device="cpu")])
    with (
        pytest.raises(ConfigError, match=r"^the device has no room for the model; .*--quantization"),
        room_for("the model"),
    ):
        models.load_all()


def test_remedies_depend_on_the_device_and_other_errors_are_unchanged() -> None:
    with pytest.raises(ConfigError) as raised, room_for("the model", CPU_REMEDIES):
        raise MemoryError
    assert "--gpu-memory-utilization" not in str(raised.value)
    with pytest.raises(RuntimeError, match="another"), room_for("the model"):
        raise RuntimeError("another")
