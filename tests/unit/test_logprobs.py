"""Log-probabilities over the vocabulary, a chunk of hidden states at a time, against autograd through all logits."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.training import logprobs as module
from megatron_rl.training.logprobs import projected_logprobs
from tests.cases.group import group_of_one
from tests.cases.logits import logprobs_of_logits
from tests.cases.softmax import Case, gradients, plain_scores

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


def test_a_label_is_likeliest_where_no_allowed_token_is_likelier(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [0.0, 2.0, 1.0, 9.0], [1.0, 1.0, 0.0, 9.0]])  # the last one is banned
    _, _, likeliest = logprobs_of_logits(logits, torch.tensor([1, 2, 0]), temperature=0.5, vocabulary=3, group=group)
    assert likeliest.tolist() == [True, False, True]


@pytest.mark.parametrize(("tokens", "chunk"), [(5, 1), (5, 2), (5, 5), (5, 99), (31, 19)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_in_chunks_are_those_of_all_logits(
    tokens: int, chunk: int, entropy_gradient: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 8 * 6)  # eight tokens of the six allowed columns
    case = Case.drawn(tokens=tokens, hidden=3, columns=7, vocabulary=6)
    check(case, group, chunk=chunk, entropy_gradient=entropy_gradient, within=1e-12)


@needs_compiler
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_compiled_once_they_are_the_same_for_chunks_of_any_length(
    entropy_gradient: bool, group: dist.ProcessGroup
) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens, chunk in ((11, 4), (13, 7), (131, 128)):
            case = Case.drawn(tokens=tokens, hidden=3, columns=37, vocabulary=33)
            check(case, group, chunk=chunk, entropy_gradient=entropy_gradient, within=1e-12, compiled=True)


@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_in_banned_rows_is_not_read(content: float, group: dist.ProcessGroup) -> None:
    case = Case.drawn(tokens=5, hidden=3, columns=7, vocabulary=4)
    with torch.no_grad():
        case.weight[4:] = content
    to_hidden, to_weight = check(case, group, chunk=2, entropy_gradient=True, within=1e-12)
    assert to_hidden.isfinite().all()
    assert (to_weight[4:] == 0).all()


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_far_apart_and_far_from_zero(entropy_gradient: bool, group: dist.ProcessGroup) -> None:
    options: dict[str, Any] = {"temperature": 0.5, "vocabulary": 4, "group": group}
    logits = torch.tensor([[3e4, 3e4 - 0.5, -3e4, -3e4], [-2e4, -2e4, -2e4, -2e4], [0.0, 0.0, 1e4, 0.0]])
    logits.requires_grad_()
    scores = logprobs_of_logits(logits, torch.tensor([1, 3, 0]), entropy_gradient=entropy_gradient, **options)
    logprobs, entropies, likeliest = scores
    p = torch.tensor([1 / (1 + torch.tensor(-1.0).exp()), 1 / (1 + torch.tensor(1.0).exp())])
    assert torch.allclose(logprobs, torch.tensor([p[1].log().item(), -torch.tensor(4.0).log().item(), -2e4]))
    assert torch.allclose(entropies, torch.tensor([-(p * p.log()).sum().item(), torch.tensor(4.0).log().item(), 0.0]))
    assert likeliest.tolist() == [False, True, False]
    (logprobs.sum() + (entropies.sum() if entropy_gradient else 0)).backward()
    expected = torch.tensor([[-p[0], p[0], 0, 0], [-0.25, -0.25, -0.25, 0.75], [1, 0, -1, 0]])
    if entropy_gradient:
        expected[0, :2] -= p * (p.log() + entropies[0].detach())
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, 2 * expected)


def test_bfloat16_logits_are_widened_before_the_softmax_and_gradients_rounded_once(group: dist.ProcessGroup) -> None:
    case = Case.drawn(tokens=11, hidden=8, columns=300, vocabulary=290)
    hidden, weight = (each.detach().bfloat16().requires_grad_() for each in (case.hidden, case.weight))
    rounded = Case((hidden @ weight.t()).detach().double(), torch.eye(300).double(), case.labels, case.probe, 290)
    options: dict[str, Any] = {"temperature": case.temperature, "vocabulary": 290, "group": group}
    scores = projected_logprobs(hidden, weight, case.labels, chunk=4, **options)
    for one, other in zip(scores, plain_scores(rounded), strict=True):
        assert one.dtype in (torch.float32, torch.bool)
        assert torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)
    to_hidden, to_weight = gradients((hidden, weight), scores[0], None, case.probe.float())
    rounded.hidden.requires_grad_()
    (to_logits,) = gradients((rounded.hidden,), plain_scores(rounded)[0], None, case.probe)
    for found, expected in (
        (to_hidden, to_logits @ weight.double()),
        (to_weight, to_logits.t() @ hidden.double()),
    ):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max()


def test_the_gradient_at_a_label_that_is_nearly_certain_is_not_lost_in_rounding(group: dist.ProcessGroup) -> None:
    # In bfloat16 probabilities next to 1 are 2^-8 apart; 1 - p is 1e-3.
    hidden = torch.tensor([[6.90625, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.eye(2, dtype=torch.bfloat16)
    options: dict[str, Any] = {"chunk": 1, "temperature": 1.0, "vocabulary": 2, "group": group}
    logprobs, _, _ = projected_logprobs(hidden, weight, torch.tensor([0]), **options)
    logprobs.sum().backward()
    rest = torch.tensor(-6.90625).sigmoid().item()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[pytest.approx(rest, rel=2**-8), pytest.approx(-rest, rel=2**-8)]]


def test_nothing_of_the_size_of_the_logits_is_kept_for_backward(group: dist.ProcessGroup) -> None:
    case = Case.drawn(tokens=50, hidden=3, columns=211, vocabulary=200)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        projected_logprobs(case.hidden, case.weight, case.labels, chunk=8, group=group, **case.options)
    assert max(kept) == case.weight.numel() == 633


def check(
    case: Case, group: dist.ProcessGroup, *, chunk: int, entropy_gradient: bool, within: float, compiled: bool = False
) -> tuple[Tensor, ...]:
    """Scores and gradients are those of plain autograd; gives the gradients."""
    ours = projected_logprobs(
        case.hidden,
        case.weight,
        case.labels,
        chunk=chunk,
        group=group,
        entropy_gradient=entropy_gradient,
        compiled=compiled,
        **case.options,
    )
    assert ours[1].requires_grad is entropy_gradient
    found = []
    for logprobs, entropies, _ in (ours, plain := plain_scores(case)):
        chosen = entropies if entropy_gradient else None
        found.append(gradients((case.hidden, case.weight), logprobs, chosen, case.probe))
    torch.testing.assert_close(ours, plain, rtol=within, atol=within)
    allowed = slice(0, case.vocabulary)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=within, atol=within)
    torch.testing.assert_close(found[0][1][allowed], found[1][1][allowed], rtol=within, atol=within)
    return found[0]
