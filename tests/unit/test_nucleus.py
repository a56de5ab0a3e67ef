"""Nucleus sampling of the embedded engine, against a plain computation."""

import math

import pytest
import torch

from megatron_rl.rollout.embedded import _nucleus
from megatron_rl.rollout.engine import Request, Sampling, response_seed
from tests.tiny import SHAPE
from tests.unit.test_engine import Model, engine_of, responses, weights_of


def plain_nucleus(distribution: list[float], top_p: float) -> list[float]:
    """The most likely tokens, one after another, until they have top_p together; scaled to 1."""
    kept, total = set(), 0.0
    for token in sorted(range(len(distribution)), key=lambda token: -distribution[token]):
        kept.add(token)
        total += distribution[token]
        if total >= top_p:
            break
    return [p / total if token in kept else 0.0 for token, p in enumerate(distribution)]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, [2]), (0.49, [2]), (0.51, [2, 0]), (0.74, [2, 0]), (0.9, [2, 0, 3]), (1.0, [0, 1, 2, 3])]
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    logprobs = torch.tensor([[0.25, 0.0625, 0.5, 0.1875]]).log()
    left = _nucleus(logprobs, top_p)
    assert left.isfinite().nonzero()[:, 1].tolist() == sorted(kept)
    assert torch.equal(left[0, kept], logprobs[0, kept])


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95])
def test_nucleus_sampling_draws_as_a_plain_computation_says(untied_model: Model, top_p: float) -> None:
    directory, model = untied_model
    engine = engine_of(directory)
    engine.update_weights(weights_of(model), version=0)
    draws = 4000
    seeds = tuple(response_seed(8, sample) for sample in range(draws))
    request = Request(prompt_ids=(1, 9, 17), seeds=seeds, max_tokens=1)
    found = responses(engine, [request], Sampling(temperature=3.0, top_p=top_p)).values()
    with torch.no_grad():
        whole = (model(torch.tensor([(1, 9, 17)])).logits[0, -1].double() / 3.0).softmax(-1)
    expected = torch.tensor(plain_nucleus(whole.tolist(), top_p))
    counts = torch.bincount(torch.tensor([response.ids[0] for response in found]), minlength=SHAPE.vocab)
    assert counts[expected == 0].sum() == 0
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() < 4 * deviation + 1).all()
    assert 1 < (expected > 0).sum() < SHAPE.vocab
    for response in found:  # of the whole distribution, not of the nucleus
        assert response.logprobs[0] == pytest.approx(math.log(whole[response.ids[0]]), abs=1e-5)
