"""The embedded engine: a batched sampler on PyTorch, inside the rank. Right, small, and runs anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from megatron_rl.algorithms.policy import policy_logits
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.training import cpu
from megatron_rl.types import Response


class EmbeddedEngine:
    """Samples with the `transformers` implementation of the model and a key-value cache.

    Each response draws its own uniform numbers from its own seed, so it does not depend on its neighbours in the batch
    (up to rounding of the logits).
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        eos_token_ids: frozenset[int],
        vocabulary: int,
        dtype: torch.dtype,
        max_concurrent: int,
    ) -> None:
        """Describe the engine; `start` builds it.

        Args:
            model_dir: HF directory, of which only config.json is read; the weights come by `update_weights`.
            eos_token_ids: sampling one of them ends a response.
            vocabulary: ids from here on are never sampled.
            dtype: of the weights.
            max_concurrent: responses sampled at once.
        """
        self.model_dir, self.eos, self.vocabulary, self.dtype = model_dir, eos_token_ids, vocabulary, dtype
        self.max_concurrent = max_concurrent
        self.version = -1
        self._model: torch.nn.Module | None = None
        self._asleep = False
        self._usable = False

    def start(self) -> None:
        """Build the model; its weights are the initialisation's until the first update."""
        with cpu.device():
            config = AutoConfig.from_pretrained(self.model_dir)
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation="sdpa")
        self._model = model.eval().requires_grad_(False)
        self._sizes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def _running(self) -> torch.nn.Module:
        if self._model is None:
            raise RuntimeError("the engine is not started")
        return self._model

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine`. Raises RuntimeError when a tensor is unknown or one is missing."""
        if self._asleep:
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        self._usable = False
        targets = dict(self._running().named_parameters())
        for name, tensor in tensors:
            if name not in targets:
                raise RuntimeError(f"update_weights: the engine has no parameter {name}, or got it twice")
            if tensor.shape != targets[name].shape:  # copy_ would broadcast
                raise RuntimeError(f"update_weights: {name} is {tuple(tensor.shape)}, not {tuple(targets[name].shape)}")
            targets.pop(name).copy_(tensor)
        if targets:
            raise RuntimeError(f"update_weights: {next(iter(targets))} was not sent")
        self.version, self._usable = version, True

    def sleep(self) -> None:
        """See `Engine`."""
        self._usable, self._asleep = False, True
        for parameter in self._running().parameters():
            parameter.data = parameter.data.new_empty(0)

    def wake(self) -> None:
        """See `Engine`."""
        if self._asleep:
            for name, parameter in self._running().named_parameters():
                parameter.data = parameter.data.new_empty(self._sizes[name])
            self._asleep = False

    def resume(self) -> None:
        """See `Engine`. The cache is made for each batch, so there is nothing to take."""

    def health(self) -> bool:
        """See `Engine`."""
        return self._usable

    def stop(self) -> None:
        """See `Engine`."""
        self._model, self._usable = None, False

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Response]]:
        """See `Engine`. A prompt's keys and values are computed once for all its samples in a batch."""
        if not self._usable:
            raise RuntimeError("generate: the weights are undefined (asleep, or not updated since waking)")
        chunk: list[tuple[int, int]] = []
        for number, request in enumerate(requests):
            for sample in range(len(request.seeds)):
                chunk.append((number, sample))
                if len(chunk) == self.max_concurrent:
                    yield from self._sample(requests, chunk, sampling)
                    chunk = []
        if chunk:
            yield from self._sample(requests, chunk, sampling)

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """See `Engine`."""
        if not self._usable:
            raise RuntimeError("score: the weights are undefined (asleep, or not updated since waking)")
        scores = []
        for ids in sequences:
            tokens = torch.tensor([ids], device=next(self._running().parameters()).device)
            logits = policy_logits(self._running()(tokens).logits[0, :-1], temperature=1.0, allowed=self.vocabulary)
            scores.append(tuple(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()))
        return scores

    def _sample(
        self, requests: Sequence[Request], chunk: list[tuple[int, int]], sampling: Sampling
    ) -> Iterator[tuple[int, int, Response]]:
        batch = _Batch(self._running(), [requests[n].prompt_ids for n in dict.fromkeys(n for n, _ in chunk)])
        order = {number: row for row, number in enumerate(dict.fromkeys(n for n, _ in chunk))}
        logits = batch.prefill(copies=[order[number] for number, _ in chunk])
        seeds = [requests[number].seeds[sample] for number, sample in chunk]
        budgets = [requests[number].max_tokens for number, _ in chunk]
        uniforms = _uniforms(seeds, max(budgets)).to(logits.device)
        eos = torch.tensor(sorted(self.eos), device=logits.device)
        ids: list[list[int]] = [[] for _ in chunk]
        logprobs: list[list[float]] = [[] for _ in chunk]
        alive = list(range(len(chunk)))  # the response of each row of the batch, in order
        for position in range(max(budgets)):
            scaled = policy_logits(logits, temperature=sampling.temperature, allowed=self.vocabulary)
            distribution = scaled.log_softmax(-1)
            if sampling.greedy:
                tokens = distribution.argmax(-1)
            else:
                tokens = _draw(_nucleus(distribution, sampling.top_p), uniforms[alive, position])
            chosen = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            stopped = torch.isin(tokens, eos).tolist()
            for row, token, logprob in zip(alive, tokens.tolist(), chosen.tolist(), strict=True):
                ids[row].append(token)
                logprobs[row].append(logprob)
            going = []
            for place, (row, over) in enumerate(zip(alive, stopped, strict=True)):
                if not over and position + 1 < budgets[row]:
                    going.append(place)
                else:
                    response = Response(
                        ids=tuple(ids[row]),
                        logprobs=tuple(logprobs[row]),
                        finish_reason="stop" if over else "length",
                        weight_versions=(self.version,) * len(ids[row]),
                    )
                    yield (*chunk[row], response)
            if not going:
                return
            if len(going) < len(alive):
                rows = torch.tensor(going, device=logits.device)
                batch.select(rows)
                alive, tokens = [alive[place] for place in going], tokens[rows]
            logits = batch.step(tokens)


class _Batch:
    """Left-padded prompts with their key-value cache."""

    def __init__(self, model: torch.nn.Module, prompts: Sequence[tuple[int, ...]]) -> None:
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        self.mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, width - len(prompt) :] = 1
        self.tokens, self.mask = self.tokens.to(device), self.mask.to(device)

    def prefill(self, copies: list[int]) -> Tensor:
        """Logits after each prompt, `[rows, vocabulary]`, row i for prompt `copies[i]`."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(self.tokens, positions)
        rows = torch.tensor(copies, device=logits.device)
        self.positions = positions[:, -1]
        self.select(rows)
        return logits[rows]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token in each row."""
        self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), 1)
        self.positions = self.positions + 1
        return self._forward(tokens.unsqueeze(1), self.positions.unsqueeze(1))

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def _uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """`[responses, count]` uniform numbers, each row from its own generator."""
    return torch.from_numpy(np.stack([np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]))


def _nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """The distributions `[rows, ids]` without the ids outside the nucleus (−inf there), not normalised again."""
    if top_p >= 1:
        return logprobs
    ordered, ids = logprobs.sort(stable=True, dim=-1, descending=True)
    mass = ordered.double().exp()
    outside = mass.cumsum(-1) - mass >= top_p  # those before it have top_p already; never so for the likeliest
    return logprobs.masked_fill(torch.zeros_like(outside).scatter(-1, ids, outside), -torch.inf)


def _draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """The token at quantile `uniforms` of each distribution, `[rows]`. In float64: a cumulative sum of many floats."""
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)
