"""Which CPUs compute a float32 model's VAE in bfloat16, and which have AMX."""

from __future__ import annotations

import pytest
import torch

from model_executor import cpu


@pytest.mark.parametrize(
    ("vendor", "has_bfloat16", "has_amx", "gains"),
    [
        ("AuthenticAMD", True, False, True),  # Zen 4, Zen 5
        ("AuthenticAMD", False, False, False),  # Zen 3
        ("GenuineIntel", True, True, True),  # Sapphire Rapids
        ("GenuineIntel", True, False, False),  # the same, in a virtual machine that hides AMX
        ("", False, False, False),
    ],
)
def test_only_cpus_that_were_faster_compute_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, vendor: str, has_bfloat16: bool, has_amx: bool, gains: bool
) -> None:
    monkeypatch.setattr(cpu, "_fact", {"vendor_id": vendor}.__getitem__)
    monkeypatch.setattr(cpu, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(cpu, "cpu_has_amx", lambda: has_amx)
    assert cpu.cpu_gains_by_bfloat16() is gains


@pytest.mark.parametrize("is_granted", [True, False])
def test_amx_that_the_system_refuses_counts_as_none(monkeypatch: pytest.MonkeyPatch, is_granted: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: is_granted)
    assert cpu.cpu_has_amx() is is_granted
