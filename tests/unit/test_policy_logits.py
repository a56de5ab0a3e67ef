"""The distribution that is sampled from and trained: logits over temperature, banned columns outside the softmax."""

import math

import pytest
import torch

from megatron_rl.algorithms.policy import policy_logits

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)


def test_temperature_divides_the_logits() -> None:
    scaled = policy_logits(torch.tensor([[1.0, -2.0, 4.0]]), temperature=0.5, allowed=3)
    assert scaled.tolist() == [[2.0, -4.0, 8.0]]


def test_a_temperature_of_one_half_sharpens_a_known_distribution() -> None:
    q = policy_logits(P.log(), temperature=0.5, allowed=3).softmax(-1)
    assert q.tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6], rel=1e-6)
    assert -(q * q.log()).sum().item() == pytest.approx(0.8675632284814612, rel=1e-6)


def test_banned_columns_are_outside_the_softmax() -> None:
    # The banned columns are by far the most likely ones.
    logits = torch.cat((P.log(), torch.tensor([50.0, 80.0], dtype=torch.float64)))
    q = policy_logits(logits, temperature=1.0, allowed=3).softmax(-1)
    assert q.tolist() == pytest.approx([0.5, 0.25, 0.25, 0.0, 0.0], rel=1e-6)
    assert q[3:].tolist() == [0.0, 0.0]


def test_no_column_need_be_allowed_on_a_rank_that_holds_only_padding() -> None:
    assert policy_logits(torch.zeros(2, 3), temperature=1.0, allowed=0).tolist() == [[-math.inf] * 3] * 2


def test_the_logits_are_widened_and_left_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    scaled = policy_logits(logits, temperature=3.0, allowed=2)
    assert scaled.dtype == torch.float32
    assert scaled[0, 0].item() == pytest.approx(1 / 3, rel=1e-7)  # divided after widening: bfloat16 knows 3 digits
    assert logits.tolist() == [[1.0, 2.0, 3.0]]
    wide = torch.tensor([[1.0, 2.0, 3.0]])
    policy_logits(wide, temperature=1.0, allowed=1)
    assert wide.tolist() == [[1.0, 2.0, 3.0]]


def test_gradients_flow_to_allowed_columns_only() -> None:
    logits = torch.tensor([0.3, -0.2, 5.0], requires_grad=True)
    policy_logits(logits, temperature=2.0, allowed=2).log_softmax(-1)[0].backward()
    right = 1 / (1 + math.exp(-0.25))
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([(1 - right) / 2, -(1 - right) / 2, 0.0], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        policy_logits(torch.zeros(3), temperature=temperature, allowed=3)
