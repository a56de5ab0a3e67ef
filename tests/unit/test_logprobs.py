"""Log-probabilities over the vocabulary: which token is likeliest, and hidden states a chunk at a time."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_rl.training.logprobs import projected_logprobs, token_logprobs
from tests.cases.group import group_of_one


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


def test_a_label_is_likeliest_where_no_allowed_token_is_likelier(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [0.0, 2.0, 1.0, 9.0], [1.0, 1.0, 0.0, 9.0]])  # the last one is banned
    _, _, likeliest = token_logprobs(logits, torch.tensor([1, 2, 0]), temperature=0.5, vocabulary=3, group=group)
    assert likeliest.tolist() == [True, False, True]


@pytest.mark.parametrize("chunk", [1, 2, 5, 99])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_from_hidden_states_in_chunks_are_those_of_all_logits(
    chunk: int, entropy_gradient: bool, group: dist.ProcessGroup
) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=draw).double().requires_grad_() for size in ((5, 3), (7, 3)))
    labels, probe = torch.tensor([0, 5, 2, 2, 4]), torch.randn(2, 5, generator=draw).double()
    options = {"temperature": 0.7, "vocabulary": 6, "entropy_gradient": entropy_gradient}
    whole = token_logprobs(hidden @ weight.t(), labels, group=group, **options)  # type: ignore[arg-type]
    parts = projected_logprobs(hidden, weight, labels, chunk=chunk, group=group, **options)  # type: ignore[arg-type]
    found = []
    for logprobs, entropies, _ in (whole, parts):
        total = (probe[0] * logprobs).sum() + ((probe[1] * entropies).sum() if entropy_gradient else 0)
        found.append(torch.autograd.grad(total, (hidden, weight)))
    for one, other in ((whole, parts), found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
