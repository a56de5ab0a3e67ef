"""Soft overlong punishment (DAPO, eq. 13), against the paper's numbers and a toy's."""

import pytest
import torch

from megatron_rl.algorithms.shaping import soft_overlong_penalty


def test_the_papers_lengths() -> None:
    lengths = torch.tensor([1, 16383, 16384, 16385, 17408, 18432, 20479, 20480, 20481, 24576])
    penalties = soft_overlong_penalty(lengths, max_length=20480, buffer=4096)
    expected = [0.0, 0.0, 0.0, -0.000244140625, -0.25, -0.5, -0.999755859375, -1.0, -1.0, -1.0]
    assert penalties.tolist() == expected
    assert penalties.dtype == torch.float64


def test_a_toy_of_twenty_tokens_with_a_buffer_of_eight() -> None:
    lengths = torch.tensor([0, 11, 12, 13, 16, 19, 20, 21, 40])
    penalties = soft_overlong_penalty(lengths, max_length=20, buffer=8)
    assert penalties.tolist() == [0.0, 0.0, 0.0, -0.125, -0.5, -0.875, -1.0, -1.0, -1.0]


def test_without_a_floor_the_line_goes_on() -> None:
    penalties = soft_overlong_penalty(torch.tensor([5, 20480, 20481, 24576]), max_length=20480, buffer=4096, floor=None)
    assert penalties.tolist() == [0.0, -1.0, -1.000244140625, -2.0]


def test_the_buffer_may_be_the_whole_budget() -> None:
    assert soft_overlong_penalty(torch.tensor([0, 1, 5]), max_length=5, buffer=5).tolist() == [0.0, -0.2, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_outside_the_budget_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=rf"buffer must be in 1\.\.20 .* got {buffer}"):
        soft_overlong_penalty(torch.tensor([3]), max_length=20, buffer=buffer)
