"""What is noted of the tensors that caches hand out."""

from __future__ import annotations

from threading import Thread

import torch
from torch import Tensor

from model_executor.kernels.gpu_tables import LARGE_ROWS, MAX_TABLES, norm_rows, offsets, rows_of, table
from model_executor.kernels.held import hold, holding

CPU = torch.device("cpu")


def test_tensors_are_noted_only_while_this_thread_holds() -> None:
    noted, inner = list[Tensor](), list[Tensor]()
    tensors = [torch.empty(0) for _ in range(5)]
    assert hold(tensors[0]) is tensors[0]
    with holding(noted):
        hold(tensors[1])
        with holding(inner):
            hold(tensors[2])
        other = Thread(target=hold, args=[tensors[3]])
        other.start()
        other.join()
    hold(tensors[4])
    assert [x is tensors[1] for x in noted] == [True]
    assert [x is tensors[2] for x in inner] == [True]


def test_index_tables_are_noted_each_time() -> None:
    """Also those that are in the caches already."""
    cpu = torch.device("cpu")
    for _ in range(2):
        noted = list[Tensor]()
        with holding(noted):
            rows, requests = table(((0, 2), (3, 4)), cpu)
            starts, chosen = offsets(((0, 2), (2, 4)), cpu), rows_of(((1, 3),), cpu)
            normed = norm_rows((((0, 2),),), (), cpu)
        assert normed is not None
        expected = [rows, requests, starts, chosen, normed]
        assert [x.data_ptr() for x in noted] == [x.data_ptr() for x in expected]


def test_rows_of_norms_and_of_the_sums_before_them() -> None:
    """Two norms of rows of two layers; None where others are added to than are normed."""
    text, image, cpu = ((0, 1), (3, 4)), ((1, 3), (4, 5)), torch.device("cpu")
    both = norm_rows((text, image), (text, image), cpu)
    assert both is not None
    assert both.tolist() == [[0, 3, 1, 2, 4], [0, 1, 0, 0, 1], [0, 1, -1, -2, -3]]
    joint = norm_rows((text, image), (((0, 3), (3, 5)),), cpu)
    assert joint is not None
    assert joint[2].tolist() == [0, 3, 1, 2, 4]
    assert norm_rows((image,), (text, image), cpu) is None
    assert norm_rows((text, image), (image,), cpu) is None


def test_large_tables_push_out_no_small_ones() -> None:
    """Those of batches, and of one request's steps: the tables of a step must still be there when it is captured."""
    small = rows_of(((3, 9),), CPU)
    first = rows_of(((0, LARGE_ROWS + 1),), CPU)
    for start in range(1, MAX_TABLES + 2):
        rows_of(((start, start + LARGE_ROWS + 1),), CPU)
    assert rows_of(((3, 9),), CPU) is small
    assert rows_of(((0, LARGE_ROWS + 1),), CPU) is not first
    for start in range(MAX_TABLES):
        rows_of(((start, start + 2),), CPU)
    assert rows_of(((3, 9),), CPU) is not small
