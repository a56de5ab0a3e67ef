"""Normalisations as data: the weight of each token, computed once per optimizer step before anything is split.

The objective is `sum_t w_t l_t`, a plain sum, so it does not depend on micro-batches, their order, DP, CP or PP.
"""

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.functions import load_function

NORMALISATIONS = ("sequence_mean", "token_mean_group", "token_mean_batch", "constant")


def loss_weights(lengths: Tensor, group_ids: Tensor, *, mode: str, budget: int | None = None) -> Tensor:
    """Weight of each token of each response.

    N counts the responses with trained tokens, Q the groups that hold one. A response without trained tokens has
    weight 0 and counts in no N, Q or sum.

    Args:
        lengths: trained tokens of each response of the optimizer step, `[responses]`.
        group_ids: `[responses]`, integers.
        mode: `sequence_mean` 1/(N len_i) (GRPO); `token_mean_group` 1/(Q · tokens of the group) (DAPO eq. 8);
            `token_mean_batch` 1/tokens of the step (DAPO as most code has it); `constant` 1/(N budget) (Dr. GRPO); or
            `package.module:function`, called as `function(lengths, group_ids, budget)`.
        budget: the generation budget L of `constant`, in tokens; never the padded length.

    Returns:
        `[responses]`, float64.

    Raises:
        ValueError: unknown mode, or `constant` without a budget.
        UserError: there is no such function, or it returned another shape, something negative or not finite.
    """
    lengths = lengths.double()
    trained = lengths > 0
    responses = trained.sum().clamp(min=1).double()
    if mode == "sequence_mean":
        weights = 1 / (responses * lengths)
    elif mode == "token_mean_group":
        groups, index = group_ids.unique(return_inverse=True)
        tokens = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, lengths)
        weights = 1 / ((tokens > 0).sum() * tokens[index])
    elif mode == "token_mean_batch":
        weights = (1 / lengths.sum()).expand(len(lengths))
    elif mode == "constant":
        if budget is None or budget < 1:
            raise ValueError(f"mode 'constant' needs budget, the longest response in tokens, got {budget}")
        weights = (1 / (responses * float(budget))).expand(len(lengths))
    elif ":" in mode:
        weights = _by_function(mode, lengths, group_ids, budget)
    else:
        raise ValueError(f"unknown normalisation {mode!r}: one of {', '.join(NORMALISATIONS)}, or module:function")
    return torch.where(trained, weights, 0.0)


def _by_function(name: str, lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    weights = load_function(name, "algorithm.normalisation")(lengths, group_ids, budget)
    if not isinstance(weights, Tensor) or weights.shape != lengths.shape:
        raise UserError(
            f"algorithm.normalisation: {name} did not return one number for each of {len(lengths)} responses"
        )
    used = weights.double()[lengths > 0]
    if not (used.isfinite() & (used >= 0)).all():
        raise UserError(f"algorithm.normalisation: {name} returned a weight that is negative or not finite")
    return weights.double()
