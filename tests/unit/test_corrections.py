"""Importance weights between engine and trainer, worked out by hand for two responses and a token outside the mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.corrections import correction_weights, mismatch_metrics
from tests.cases.step import double, loss_inputs

RATIOS = [3.0, 0.5, 100.0, 1.0, 0.25, 2.0]
"""Trainer over engine. The third token is outside the mask; the products of the two responses are 3/2 and 1/2."""
MASK = torch.tensor([True, True, False, True, True, True])
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
ROLLOUT = double([-1.0, -2.0, -3.0, -1.5, -0.5, -2.5])


def arguments(trainer: Tensor, rollout: Tensor = ROLLOUT) -> tuple[Any, ...]:
    inputs = loss_inputs(
        trainer, torch.zeros_like(trainer), response_ids=IDS[: len(trainer)], mask=MASK[: len(trainer)]
    )
    return trainer, rollout, inputs.mask, inputs.sequence_sum


def weights(**options: Any) -> list[float]:
    return correction_weights(*arguments(double(RATIOS).log() + ROLLOUT), **options).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 0.5, 1, 1, 0.25, 2]),
        ({"cap": 1.25}, [1.25, 0.5, 1, 1, 0.25, 1.25]),
        ({"cap": 5.0}, [3, 0.5, 1, 1, 0.25, 2]),
        ({"level": "sequence"}, [1.5, 1.5, 1, 0.5, 0.5, 0.5]),
        ({"level": "sequence", "cap": 1.25}, [1.25, 1.25, 1, 0.5, 0.5, 0.5]),
        ({"mode": "mask", "cap": 2.5}, [0, 0.5, 1, 1, 0.25, 2]),
        ({"mode": "mask", "cap": 2.5, "floor": 0.3}, [0, 0.5, 1, 1, 0, 2]),
        ({"mode": "mask", "cap": 5.0, "floor": 1.0}, [3, 0, 1, 1, 0, 2]),
        ({"mode": "mask", "level": "sequence"}, [1.5, 1.5, 1, 0.5, 0.5, 0.5]),
        ({"mode": "mask", "level": "sequence", "cap": 1.25}, [0, 0, 1, 0.5, 0.5, 0.5]),
        ({"mode": "mask", "level": "sequence", "floor": 0.75}, [1.5, 1.5, 1, 0, 0, 0]),
    ],
)
def test_weights_worked_out_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert weights(**options) == pytest.approx(expected, abs=1e-14)


def test_where_trainer_and_engine_agree_all_weights_are_exactly_one() -> None:
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            found = correction_weights(*arguments(ROLLOUT), level=level, mode=mode, cap=1.0, floor=1.0)
            assert found.tolist() == [1.0] * 6


def test_a_correction_carries_no_gradient() -> None:
    trainer = (double(RATIOS).log() + ROLLOUT).requires_grad_()
    assert not correction_weights(*arguments(trainer)).requires_grad
    assert not any(total.requires_grad for total, _ in mismatch_metrics(*arguments(trainer)).values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_too_large_for_float32_is_capped_or_left_out(level: Any) -> None:
    trainer, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([-300.0, -1.0])
    others = [2.0, 2.0] if level == "sequence" else [2.0, 1.0]
    assert correction_weights(*arguments(trainer, rollout), level=level).tolist() == others
    masked = correction_weights(*arguments(trainer, rollout), level=level, mode="mask").tolist()
    assert masked == ([0.0, 0.0] if level == "sequence" else [0.0, 1.0])


@pytest.mark.parametrize("outside", [math.nan, math.inf, 1e4])
def test_what_stands_outside_the_mask_matters_nowhere(outside: float) -> None:
    trainer = torch.where(MASK, double(RATIOS).log() + ROLLOUT, outside)
    for level in ("token", "sequence"):
        assert correction_weights(*arguments(trainer), level=level).tolist() == pytest.approx(weights(level=level))
    assert all(total.isfinite() for total, _ in mismatch_metrics(*arguments(trainer)).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "group"}, "'group', 'truncate': token or sequence"),
        ({"mode": "clip"}, "'token', 'clip': .* truncate or mask"),
        ({"cap": 0.9}, "floor <= 1 <= cap, got 0.0 and 0.9"),
        ({"floor": 1.1, "mode": "mask"}, "got 1.1 and 2.0"),
        ({"floor": -0.1, "mode": "mask"}, "got -0.1 and 2.0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights(**options)


def test_metrics_worked_out_by_hand() -> None:
    found = mismatch_metrics(*arguments(double(RATIOS).log() + ROLLOUT), cap=1.25)
    assert {name: weight.item() for name, (_, weight) in found.items()} == dict.fromkeys(found, 5)
    assert {name: total.item() for name, (total, _) in found.items()} == pytest.approx(
        {
            # Of ratios 3, 1/2, 1, 1/4 and 2.
            "mismatch/logprob_abs": math.log(3) + 4 * math.log(2),
            "mismatch/kl": (3 + 0.5 + 1 + 0.25 + 2) - 5 - math.log(3 * 0.5 * 1 * 0.25 * 2),
            "mismatch/ratio": 6.75,
            "mismatch/ratio_square": 9 + 0.25 + 1 + 0.0625 + 4,
            "mismatch/above_cap": 2,
            "mismatch/sequence_above_cap": 2,  # both tokens of the first response: 3/2
        },
        abs=1e-13,
    )


def test_the_divergence_is_from_the_engine_to_the_trainer() -> None:
    engine, trainer = double([0.2, 0.5, 0.3]), double([0.4, 0.35, 0.25])
    exact = sum(e * math.log(e / t) for e, t in zip(engine.tolist(), trainer.tolist(), strict=True))
    each = [
        mismatch_metrics(*arguments(trainer[[token]].log(), engine[[token]].log()))["mismatch/kl"][0].item()
        for token in range(3)
    ]
    assert sum(e * kl for e, kl in zip(engine.tolist(), each, strict=True)) == pytest.approx(exact, abs=1e-15)


def test_metrics_of_no_token_are_sums_of_zero() -> None:
    nothing = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool), lambda values: values
    assert {(total.item(), weight.item()) for total, weight in mismatch_metrics(*nothing).values()} == {(0.0, 0)}
