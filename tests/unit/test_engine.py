"""The embedded engine on a tiny random model, against transformers' own forward pass and generation."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from megatron_rl.resharding.names import Shape, hf_shapes
from megatron_rl.rollout.embedded import EmbeddedEngine, _draw
from megatron_rl.rollout.engine import Request, Sampling, generate, response_seed
from megatron_rl.types import Response
from tests.tiny import LLAMA, LLAMA3_ROPE, QWEN3, SHAPE, random_model, write_model

Model = tuple[Path, Qwen2ForCausalLM]
EOS = frozenset({2, 11, 30})
# Uneven prompts: in a batch the shorter ones are padded.
PROMPTS = [(1, 9, 17), (1, 4), (3, 21, 5, 8, 35, 36), (7,), (1, 9, 17, 20)]


def weights_of(model: Qwen2ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def engine_of(directory: Path, *, vocabulary: int = SHAPE.vocab, max_concurrent: int = 512) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        directory, eos_token_ids=EOS, vocabulary=vocabulary, dtype=torch.float32, max_concurrent=max_concurrent
    )
    engine.start()
    return engine


@pytest.fixture(params=["untied_model", "tied_model"])
def synced(request: pytest.FixtureRequest) -> tuple[EmbeddedEngine, Qwen2ForCausalLM]:
    """An engine with the weights of a model, and the model."""
    directory, model = request.getfixturevalue(request.param)
    engine = engine_of(directory)
    engine.update_weights(weights_of(model), version=4)
    return engine, model


def requests_of(samples: int, max_tokens: int) -> list[Request]:
    return [
        Request(
            prompt_ids=prompt,
            seeds=tuple(response_seed(0, sum(prompt), sample) for sample in range(samples)),
            max_tokens=max_tokens,
        )
        for prompt in PROMPTS
    ]


def responses(engine: EmbeddedEngine, requests: list[Request], sampling: Sampling) -> dict[tuple[int, int], Response]:
    """(request, sample) to response; each comes once."""
    found: dict[tuple[int, int], Response] = {}
    for number, sample, response in generate(engine, requests, sampling):
        assert (number, sample) not in found
        found[number, sample] = response
    assert found.keys() == {(n, s) for n, request in enumerate(requests) for s in range(len(request.seeds))}
    return found


def logprobs_under(
    model: Qwen2ForCausalLM, prompt: tuple[int, ...], ids: tuple[int, ...], temperature: float, vocabulary: int
) -> list[float]:
    """Log-probabilities of a response by one forward pass over the whole of it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, :vocabulary]
    return (logits.double() / temperature).log_softmax(-1)[torch.arange(len(ids)), list(ids)].tolist()


# ---- what is sampled


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_logprobs_are_those_of_a_forward_pass(
    synced: tuple[EmbeddedEngine, Qwen2ForCausalLM], temperature: float
) -> None:
    engine, model = synced
    for (number, _), response in responses(engine, requests_of(5, 9), Sampling(temperature=temperature)).items():
        expected = logprobs_under(model, PROMPTS[number], response.ids, temperature, SHAPE.vocab)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("shape", "rope"), [(QWEN3, None), (LLAMA, None), (LLAMA, LLAMA3_ROPE)])
def test_every_family_takes_the_tensors_of_the_table_and_samples(
    shape: Shape, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = write_model(tmp_path, shape, seed=3, rope_parameters=rope)
    tensors = model.state_dict()
    engine = engine_of(tmp_path)
    engine.update_weights(((name, tensors[name]) for name in hf_shapes(shape)), version=0)
    for (number, _), response in responses(engine, requests_of(2, 9), Sampling()).items():
        expected = logprobs_under(model, PROMPTS[number], response.ids, 1.0, SHAPE.vocab)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)


def test_greedy_is_greedy_as_transformers_is(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, model = synced
    found = responses(engine, requests_of(1, 12), Sampling(greedy=True))
    for number, prompt in enumerate(PROMPTS):
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=sorted(EOS),
        )
        assert found[number, 0].ids == tuple(whole[0, len(prompt) :].tolist())
        expected = logprobs_under(model, prompt, found[number, 0].ids, 1.0, SHAPE.vocab)
        assert found[number, 0].logprobs == pytest.approx(expected, abs=1e-5)


def test_a_response_ends_with_its_first_end_of_sequence_or_at_the_budget(
    synced: tuple[EmbeddedEngine, Qwen2ForCausalLM],
) -> None:
    found = responses(synced[0], requests_of(40, 7), Sampling(temperature=1.5)).values()
    for response in found:
        ended = response.ids[-1] in EOS
        assert response.finish_reason == ("stop" if ended else "length")
        assert not EOS & set(response.ids[:-1])
        assert len(response.ids) <= 7
        assert ended or len(response.ids) == 7
        assert len(response.logprobs) == len(response.ids)
        assert response.weight_versions == (4,) * len(response.ids)
    kinds = {(response.finish_reason, len(response.ids) == 7) for response in found}
    assert kinds == {("stop", False), ("stop", True), ("length", True)}  # all three were met


def test_tokens_come_as_often_as_they_are_likely(untied_model: Model) -> None:
    directory, model = untied_model
    engine = engine_of(directory)
    engine.update_weights(weights_of(model), version=0)
    draws = 4000
    seeds = tuple(response_seed(7, sample) for sample in range(draws))
    request = Request(prompt_ids=(1, 9, 17), seeds=seeds, max_tokens=1)
    found = responses(engine, [request], Sampling(temperature=3.0)).values()
    with torch.no_grad():
        expected = (model(torch.tensor([(1, 9, 17)])).logits[0, -1] / 3.0).softmax(-1)
    counts = torch.bincount(torch.tensor([response.ids[0] for response in found]), minlength=SHAPE.vocab)
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() < 4 * deviation + 1).all()
    assert (expected > 0.02).sum() > 5  # the test would see a wrong distribution


def test_a_token_without_probability_is_not_drawn_at_the_ends_of_the_unit_interval() -> None:
    logprobs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log().expand(4, 5)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert _draw(logprobs, uniforms).tolist() == [1, 1, 3, 3]


# ---- seeds


def test_a_response_depends_on_nothing_but_its_prompt_and_seed(untied_model: Model) -> None:
    directory, model = untied_model
    sampling = Sampling()
    requests = requests_of(6, 8)
    results = []
    for concurrent in (512, 1, 4):
        engine = engine_of(directory, max_concurrent=concurrent)
        engine.update_weights(weights_of(model), version=0)
        results.append(responses(engine, requests, sampling))
    alone = {
        (number, sample): responses(engine, [replace(request, seeds=(seed,))], sampling)[0, 0]
        for number, request in enumerate(requests)
        for sample, seed in enumerate(request.seeds)
    }
    backwards = responses(engine, requests[::-1], sampling)
    results += [alone, {(4 - number, sample): response for (number, sample), response in backwards.items()}]
    for other in results[1:]:
        for place, response in results[0].items():
            assert other[place].ids == response.ids
            assert other[place].logprobs == pytest.approx(response.logprobs, abs=1e-5)
    assert len({response.ids for response in results[0].values()}) > 20


def test_a_longer_budget_begins_with_the_same_tokens(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    short, long = (responses(synced[0], requests_of(6, n), Sampling()) for n in (4, 9))
    for place, response in short.items():
        assert long[place].ids[: len(response.ids)] == response.ids


def test_every_request_has_a_budget_of_its_own(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    budgets = (3, 9, 1, 6, 4)
    requests = [replace(request, max_tokens=n) for request, n in zip(requests_of(6, 9), budgets, strict=True)]
    whole = responses(synced[0], requests_of(6, 9), Sampling())
    for (number, sample), response in responses(synced[0], requests, Sampling()).items():
        longest = whole[number, sample]
        assert response.ids == longest.ids[: budgets[number]]
        assert response.logprobs == pytest.approx(longest.logprobs[: budgets[number]], abs=1e-5)
        assert response.finish_reason == ("length" if len(longest.ids) > budgets[number] else longest.finish_reason)


def test_seeds_differ_by_every_part_of_the_place() -> None:
    paths = [
        (0, 0, 1, 5, 3),
        (1, 0, 1, 5, 3),
        (0, 1, 1, 5, 3),
        (0, 0, 2, 5, 3),
        (0, 0, 1, 6, 3),
        (0, 0, 1, 5, 4),
        (0, 1),
    ]
    seeds = [response_seed(*path) for path in paths]
    assert len(set(seeds)) == len(paths)
    assert seeds == [response_seed(*path) for path in paths]
    assert all(0 <= seed < 2**64 for seed in seeds)


# ---- banned ids


@pytest.fixture(scope="module")
def biased_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that all but always says ids from 23 on: one direction of every hidden state points to them."""
    directory = tmp_path_factory.mktemp("biased") / "model"
    model = write_model(directory, SHAPE, seed=5)
    model.model.embed_tokens.weight[:, 0] = 100.0
    model.model.norm.weight[0] = 1.0
    model.lm_head.weight[23:, 0] = 5.0
    return directory, model


def test_ids_beyond_the_vocabulary_are_never_sampled_and_outside_the_softmax(biased_model: Model) -> None:
    directory, model = biased_model
    sampling = Sampling(temperature=1.3)
    free = engine_of(directory)
    free.update_weights(weights_of(model), version=0)
    tokens = [token for response in responses(free, requests_of(8, 6), sampling).values() for token in response.ids]
    assert min(tokens) >= 23

    banned = engine_of(directory, vocabulary=23)
    banned.update_weights(weights_of(model), version=0)
    for (number, _), response in responses(banned, requests_of(8, 6), sampling).items():
        assert max(response.ids) < 23
        expected = logprobs_under(model, PROMPTS[number], response.ids, 1.3, 23)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)
    for response in responses(banned, requests_of(1, 6), Sampling(greedy=True)).values():
        assert max(response.ids) < 23


# ---- weights, sleeping, waking


def sample_ids(engine: EmbeddedEngine) -> dict[tuple[int, int], tuple[int, ...]]:
    found = responses(engine, requests_of(3, 6), Sampling())
    return {place: response.ids for place, response in found.items()}


def test_after_an_update_the_new_weights_speak(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, model = synced
    before = sample_ids(engine)
    other = random_model(replace(SHAPE, tied=model.config.tie_word_embeddings), seed=9)
    engine.update_weights(weights_of(other), version=5)
    assert sample_ids(engine) != before
    for (number, _), response in responses(engine, requests_of(3, 6), Sampling()).items():
        assert set(response.weight_versions) == {5}
        expected = logprobs_under(other, PROMPTS[number], response.ids, 1.0, SHAPE.vocab)
        assert response.logprobs == pytest.approx(expected, abs=1e-5)
    engine.update_weights(weights_of(model), version=6)
    assert sample_ids(engine) == before


def test_sleeping_and_waking_twice_is_sleeping_and_waking_once(
    synced: tuple[EmbeddedEngine, Qwen2ForCausalLM],
) -> None:
    engine, model = synced
    before = sample_ids(engine)
    for action in (engine.wake, engine.sleep, engine.sleep, engine.wake, engine.wake):
        action()
    engine.update_weights(weights_of(model), version=5)
    assert sample_ids(engine) == before


def test_asleep_the_engine_holds_no_weights(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, _ = synced
    engine.sleep()
    assert sum(parameter.numel() for parameter in parameters_of(engine)) == 0
    engine.wake()
    assert sum(parameter.numel() for parameter in parameters_of(engine)) > 10_000


def test_nothing_is_generated_while_the_weights_are_undefined(untied_model: Model) -> None:
    directory, model = untied_model
    engine = engine_of(directory)

    def refused() -> bool:
        assert not engine.health()
        with pytest.raises(RuntimeError, match="weights are undefined"):
            next(generate(engine, requests_of(1, 1), Sampling()))
        return True

    assert refused()  # never updated
    engine.update_weights(weights_of(model), version=0)
    assert engine.health()
    assert sample_ids(engine)
    engine.sleep()
    assert refused()
    engine.wake()
    assert refused()  # awake, and not updated since
    engine.update_weights(weights_of(model), version=1)
    assert sample_ids(engine)


def test_waking_an_engine_that_is_awake_keeps_its_weights(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, _ = synced
    engine.wake()
    assert engine.health()
    assert sample_ids(engine)


def parameters_of(engine: EmbeddedEngine) -> list[Tensor]:
    assert engine._model is not None
    return list(engine._model.parameters())


def test_an_update_writes_every_parameter_whole(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, model = synced
    before = sample_ids(engine)
    engine.sleep()
    engine.wake()
    for parameter in parameters_of(engine):
        parameter.fill_(math.nan)  # what memory holds after waking is anybody's guess
    engine.update_weights(weights_of(model), version=5)
    assert all(parameter.isfinite().all() for parameter in parameters_of(engine))
    assert sample_ids(engine) == before


def test_a_sleeping_engine_takes_no_weights(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    engine, model = synced
    engine.sleep()
    with pytest.raises(RuntimeError, match="wake it first"):
        engine.update_weights(weights_of(model), version=5)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("missing", "model.layers.1.mlp.up_proj.weight"),
        ("unknown", "model.layers.3.mlp.up_proj.weight"),
        ("double", "model.layers.1.mlp.up_proj.weight"),
        ("transposed", "model.layers.1.mlp.up_proj.weight"),
        ("broadcast", "model.norm.weight"),
    ],
)
def test_an_update_that_is_not_exactly_the_model_is_refused(damage: str, named: str, untied_model: Model) -> None:
    directory, model = untied_model
    engine = engine_of(directory)
    engine.update_weights(weights_of(model), version=0)
    tensors = list(weights_of(model))
    if damage == "missing":
        tensors = [(name, tensor) for name, tensor in tensors if name != named]
    elif damage in ("unknown", "double"):
        tensors.append((named, torch.zeros(24, 40)))
    elif damage == "transposed":
        tensors = [(name, tensor.T if name == named else tensor) for name, tensor in tensors]
    else:
        tensors = [(name, tensor[:1] if name == named else tensor) for name, tensor in tensors]
    with pytest.raises(RuntimeError, match=named.replace(".", r"\.")):
        engine.update_weights(tensors, version=1)
    assert not engine.health()
    engine.update_weights(weights_of(model), version=1)
    assert engine.health()


def test_an_engine_that_is_not_running_says_so(untied_model: Model) -> None:
    directory, model = untied_model
    engine = EmbeddedEngine(directory, eos_token_ids=EOS, vocabulary=37, dtype=torch.float32, max_concurrent=8)
    assert not engine.health()
    with pytest.raises(RuntimeError, match="not started"):
        engine.update_weights(weights_of(model), version=0)
    engine.start()
    engine.update_weights(weights_of(model), version=0)
    engine.stop()
    engine.stop()
    assert not engine.health()
    with pytest.raises(RuntimeError):
        next(generate(engine, requests_of(1, 1), Sampling()))


def test_weights_are_held_in_the_dtype_that_was_asked_for(untied_model: Model) -> None:
    directory, model = untied_model
    engine = EmbeddedEngine(directory, eos_token_ids=EOS, vocabulary=37, dtype=torch.bfloat16, max_concurrent=8)
    engine.start()
    engine.update_weights(weights_of(model), version=0)
    assert {parameter.dtype for parameter in parameters_of(engine)} == {torch.bfloat16}
    response = responses(engine, requests_of(1, 3), Sampling())[0, 0]
    expected = logprobs_under(copy.deepcopy(model).bfloat16(), PROMPTS[0], response.ids, 1.0, 37)
    assert response.logprobs == pytest.approx(expected, abs=0.1)


def test_no_requests_give_no_responses(synced: tuple[EmbeddedEngine, Qwen2ForCausalLM]) -> None:
    assert list(generate(synced[0], [], Sampling())) == []
