"""The embedded engine: a batched sampler on PyTorch, inside the rank. Right, small, and runs anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from megatron_rl.algorithms.policy import policy_logits
from megatron_rl.resharding.engine_side.megatron_rl_loader import apply, digest
from megatron_rl.resharding.slices import Slices
from megatron_rl.rollout.engine import Answer, Request, Sampling
from megatron_rl.training import cpu
from megatron_rl.types import FinishReason, Response


class EmbeddedEngine:
    """Samples with the `transformers` implementation of the model and a key-value cache.

    Each response draws its own uniform numbers from its own seed, so it does not depend on its neighbours in the batch
    (up to rounding of the logits).
    """

    losses = 0
    """It is a part of this process: it can't be lost without it."""

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
        self._queue: list[_Wanted] = []
        self._chunk: _Chunk | None = None

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

    def begin_update(self) -> None:
        """See `Engine`."""
        if self._asleep:
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        self._usable = False
        self._drop()

    def buffer(self, size: int) -> Tensor:
        """See `Engine`."""
        return torch.empty(size, dtype=torch.uint8, device=cpu.device())

    def load(self, slices: Slices, *, read_back: bool) -> Tensor:
        """See `Engine`."""
        known = dict(self._running().named_parameters())
        return apply([known[name] for name in slices.names], slices.moves, slices.bucket, read_back=read_back)

    def digests(self, names: Sequence[str]) -> list[int]:
        """See `Engine`."""
        known = dict(self._running().named_parameters())
        return [int(digest(known[name].data)) for name in names]

    def end_update(self, version: int) -> None:
        """See `Engine`."""
        self.version, self._usable = version, True

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine`. Raises RuntimeError when a tensor is unknown or one is missing."""
        self.begin_update()
        targets = dict(self._running().named_parameters())
        for name, tensor in tensors:
            if name not in targets:
                raise RuntimeError(f"update_weights: the engine has no parameter {name}, or got it twice")
            if tensor.shape != targets[name].shape:  # copy_ would broadcast
                raise RuntimeError(f"update_weights: {name} is {tuple(tensor.shape)}, not {tuple(targets[name].shape)}")
            targets.pop(name).copy_(tensor)
        if targets:
            raise RuntimeError(f"update_weights: {next(iter(targets))} was not sent")
        self.end_update(version)

    def sleep(self) -> None:
        """See `Engine`."""
        self._usable, self._asleep = False, True
        self._drop()
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
        self._drop()

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        """See `Engine`."""
        if not self._usable:
            raise RuntimeError("submit: the weights are undefined (asleep, or not updated since waking)")
        self._queue += [_Wanted(key, sample, request, sampling) for sample in range(len(request.seeds))]

    def poll(self, wait_s: float) -> list[Answer]:
        """See `Engine`. Responses are sampled here: a chunk from the queue, and when all of it is done the next one.

        So chunks depend on the order of submissions and completions, and not on the time that anything takes.
        """
        deadline = time.monotonic() + wait_s
        done: list[Answer] = []
        while not done and (self._chunk or self._queue):
            self._chunk = self._chunk or self._next_chunk()
            done = self._chunk.step()
            if not self._chunk.alive:
                self._chunk = None
            if time.monotonic() >= deadline:
                break
        return done

    def abort(self) -> list[Answer]:
        """See `Engine`."""
        ended = self._chunk.abort() if self._chunk else []
        ended += [wanted.answer((), (), "abort", self.version) for wanted in self._queue]
        self._drop()
        return ended

    def restart(self) -> None:
        """See `losses`."""
        raise RuntimeError("the embedded engine is never lost, so it can't be started again")

    def _drop(self) -> None:
        self._chunk = None
        self._queue.clear()

    def _next_chunk(self) -> _Chunk:
        """The first ones of the queue that are sampled alike, at most `max_concurrent`."""
        sampling = self._queue[0].sampling
        chunk = list(takewhile(lambda wanted: wanted.sampling == sampling, self._queue))[: self.max_concurrent]
        del self._queue[: len(chunk)]
        return _Chunk(self._running(), chunk, self.eos, self.vocabulary, self.version)

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


@dataclass(frozen=True)
class _Wanted:
    """A response that is to be sampled."""

    key: int
    sample: int
    request: Request
    sampling: Sampling

    def answer(self, ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason, version: int) -> Answer:
        versions = (version,) * len(ids)
        response = Response(ids=tuple(ids), logprobs=tuple(logprobs), finish_reason=reason, weight_versions=versions)
        return self.key, self.sample, response


class _Chunk:
    """Responses that are sampled together, a token of each at a time."""

    def __init__(
        self, model: torch.nn.Module, wanted: Sequence[_Wanted], eos: frozenset[int], vocabulary: int, version: int
    ) -> None:
        self.model, self.wanted, self.vocabulary, self.version = model, wanted, vocabulary, version
        self.sampling = wanted[0].sampling
        self.alive = list(range(len(wanted)))
        """The response of each row of the batch, in order."""

        self._ids: list[list[int]] = [[] for _ in wanted]
        self._logprobs: list[list[float]] = [[] for _ in wanted]
        device = next(model.parameters()).device
        self._eos = torch.tensor(sorted(eos), device=device)
        # A response that goes on draws from the place in its own numbers that it would have reached.
        requests = [one.request for one in wanted]
        seeds = [request.seeds[one.sample] for request, one in zip(requests, wanted, strict=True)]
        self._uniforms = _uniforms(seeds, [(len(request.begun), request.room) for request in requests]).to(device)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Keys and values of a prompt, and of what is begun, are computed once for all their samples."""
        texts = [one.request.prompt_ids + one.request.begun for one in self.wanted]
        order = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        self._batch = _Batch(self.model, list(order))
        self._logits = self._batch.prefill(copies=[order[text] for text in texts])
        self._length = 0

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Sample a token of each response; those that it completed."""
        if self._length:
            self._logits = self._batch.step(self._tokens)
        scaled = policy_logits(self._logits, temperature=self.sampling.temperature, allowed=self.vocabulary)
        distribution = scaled.log_softmax(-1)
        if self.sampling.greedy:
            tokens = distribution.argmax(-1)
        else:
            uniforms = self._uniforms[self.alive, self._length]
            tokens = _draw(_nucleus(distribution, self.sampling.top_p), uniforms)
        chosen = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        for row, token, logprob in zip(self.alive, tokens.tolist(), chosen.tolist(), strict=True):
            self._ids[row].append(token)
            self._logprobs[row].append(logprob)
        self._length += 1
        return self._keep(tokens)

    def _keep(self, tokens: Tensor) -> list[Answer]:
        """Go on with the rows that aren't over; the others' responses."""
        done, going = [], []
        for place, (row, stopped) in enumerate(zip(self.alive, torch.isin(tokens, self._eos).tolist(), strict=True)):
            if stopped or self._length == self.wanted[row].request.room:
                done.append(self._answer(row, "stop" if stopped else "length"))
            else:
                going.append(place)
        self._tokens = tokens
        if len(going) < len(self.alive):
            self.alive = [self.alive[place] for place in going]
            if going:
                rows = torch.tensor(going, device=tokens.device)
                self._batch.select(rows)
                self._tokens = tokens[rows]
        return done

    def abort(self) -> list[Answer]:
        """What there is of those that aren't over."""
        return [self._answer(row, "abort") for row in self.alive]

    def _answer(self, row: int, reason: FinishReason) -> Answer:
        return self.wanted[row].answer(self._ids[row], self._logprobs[row], reason, self.version)


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


def _uniforms(seeds: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """`[responses, most]` uniform numbers: of each one's own generator so many after a first; 0 beyond."""
    numbers = np.zeros((len(seeds), max(count for _, count in spans)))
    for row, (seed, (first, count)) in enumerate(zip(seeds, spans, strict=True)):
        numbers[row, :count] = np.random.Generator(np.random.Philox(key=seed)).random(first + count)[first:]
    return torch.from_numpy(numbers)


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
