"""Where an objective's gradient goes: short or long, right or wrong answers, hard or easy questions.

Liu et al. (2025, section 3) prove what the normalisers favour: 1/length short right and long wrong answers, 1/std the
questions that nearly all or nearly no answers get right. These shares show it for the batch at hand.
"""

import torch
from torch import Tensor

QUARTERS = ("0_25", "25_50", "50_75", "75_100")


def gradient_shares(
    advantages: Tensor, weights: Tensor, lengths: Tensor, scores: Tensor, group_ids: Tensor
) -> dict[str, tuple[float, float]]:
    """Shares of sum |w_t A_t|, by quarter of the batch's lengths and correctness, and by the group's pass rate.

    Args:
        advantages: `[responses]`.
        weights: of each token of the response in the objective, `[responses]`; 0: not trained on.
        lengths: in tokens, `[responses]`.
        scores: how right, 0 to 1, NaN where ungraded, `[responses]`; right from 0.5 on.
        group_ids: `[responses]`.

    Returns:
        (sum, weight) pairs: `length_0_25_right` (of the shortest quarter of the trained responses), ...,
        `length_75_100_wrong`, `pass_rate_0_25` (groups with a mean score below 1/4), ..., `pass_rate_75_100`.
        Empty where nothing is trained.
    """
    graded = ~scores.isnan()
    trained = (weights > 0)[graded]
    if not trained.any():
        return {}
    mass = (advantages.abs() * weights * lengths).double()[graded]
    lengths, scores, group_ids = lengths[graded].double(), scores[graded].double(), group_ids[graded]
    bounds = lengths[trained].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    by_length = torch.bucketize(lengths, bounds, right=True)  # of equal lengths: to the longer quarter
    groups, index = group_ids.unique(return_inverse=True)
    sums, counts = (torch.zeros(len(groups), dtype=torch.float64) for _ in range(2))
    rates = sums.index_add(0, index, scores) / counts.index_add(0, index, torch.ones_like(scores))
    by_rate = (rates[index] * 4).long().clamp(max=3)
    total = float(mass.sum())
    shares = {}
    for number, name in enumerate(QUARTERS):
        for side, of_side in (("right", scores >= 0.5), ("wrong", scores < 0.5)):
            shares[f"length_{name}_{side}"] = (float(mass[(by_length == number) & of_side].sum()), total)
        shares[f"pass_rate_{name}"] = (float(mass[by_rate == number].sum()), total)
    return shares
