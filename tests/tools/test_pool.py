"""The training pool's files."""

from pathlib import Path

import pytest
import torch

from tools.train_embedded.pool import FIELDS, open_fields, pack_bits, unpack_bits


def test_a_folder_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    """Before the field `detail` came."""
    for name in FIELDS.keys() - {"detail"}:
        (tmp_path / f"{name}.bin").touch()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} lacks detail.bin: delete this folder"):
        open_fields(tmp_path, is_new=False)
    assert not (tmp_path / "detail.bin").exists()


def test_a_new_pool_is_opened_again(tmp_path: Path) -> None:
    open_fields(tmp_path, is_new=True)["clip"][3] = 7
    assert (open_fields(tmp_path, is_new=False)["clip"][3] == 7).all()


def test_bits_are_packed_and_unpacked() -> None:
    bits = torch.rand(3, 5, 16) > 0.5
    packed = pack_bits(bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, 2)
    assert torch.equal(unpack_bits(packed), bits.to(torch.uint8))
    assert pack_bits(torch.tensor([True, *[False] * 7])).item() == 128
