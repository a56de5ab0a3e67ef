"""What a forward pass keeps for backward, and what backward needs beside it, in bytes on one rank.

It counts what the local layers keep (`layers.py` and Megatron's own), operation by operation, as they run without
fusions; Transformer Engine's and fused layers keep less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.resharding.names import Shape
from megatron_rl.training.buffers import Held, Seat
from megatron_rl.training.logprobs import BLOCK, ROWS
from megatron_rl.training.options import TrainerConfig

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One rank's part of a micro-batch."""

    tokens: int
    """Of attention and MLP, whose heads and columns TP splits."""

    residual_tokens: int
    """Of norms and residuals, which sequence parallelism splits."""

    context: int
    """Tokens whose keys and values attention sees: those of all context-parallel ranks."""

    pairs: int
    """(query, key) pairs of a mask, which attention has under context parallelism; else 0."""

    query: int
    """Columns of the queries on this TP rank, and of the keys, and of the MLP's inner dimension."""

    key: int
    inner: int
    projected: int
    """Columns of queries, keys and values as they are split: of all ranks where TP has more of them than key heads."""

    heads: int
    """Query heads on this TP rank, and key heads."""

    key_heads: int
    number: int
    """Bytes of a number."""

    @classmethod
    def of(cls, shape: Shape, trainer: TrainerConfig, lengths: Sequence[int]) -> Sizes:
        """Those of a micro-batch with responses of these padded lengths, in tokens (`MicroBatch.lengths`)."""
        tp, cp = trainer.tensor_parallel_size, trainer.context_parallel_size
        tokens = sum(lengths) // cp
        key_heads = max(shape.kv_heads // tp, 1)
        return cls(
            tokens=tokens,
            residual_tokens=tokens // tp if trainer.sequence_parallel else tokens,
            context=sum(lengths),
            pairs=sum(length * length // cp for length in lengths) if cp > 1 else 0,
            query=shape.query // tp,
            key=key_heads * shape.head_dim,
            inner=shape.intermediate // tp,
            projected=(shape.query + 2 * shape.key) // (1 if tp > shape.kv_heads else tp),
            heads=shape.heads // tp,
            key_heads=key_heads,
            number=DTYPE_BYTES[trainer.dtype],
        )


def layer_bytes(shape: Shape, trainer: TrainerConfig, sizes: Sizes, *, recompute: bool = True) -> int:
    """What one layer keeps from forward to backward; `recompute=False`: while backward is in it."""
    memory = trainer.memory
    if recompute and memory.recompute == "full":
        return sizes.residual_tokens * shape.hidden * sizes.number
    again = memory.recompute_modules if recompute and memory.recompute == "selective" else ()
    norm = _norm(shape, sizes) + _input(shape, sizes)
    attention = _attention_again(sizes) if "core_attn" in again else _attention(sizes)
    if shape.family == "qwen3":
        attention += _norms_of_heads(sizes, projected_is_kept="core_attn" in again)
    rotary = 4 * sizes.tokens * shape.head_dim * sizes.number  # cosines and sines, for queries and for keys
    output = sizes.tokens * sizes.query * sizes.number  # the input of the output projection
    return 2 * norm + rotary + attention + output + (0 if "mlp" in again else _mlp(sizes))


def ends_bytes(shape: Shape, trainer: TrainerConfig, sizes: Sizes, *, first: bool, last: bool) -> int:
    """What embedding, final norm and log-probabilities keep of a micro-batch; a loss adds a few numbers a token."""
    ids = 8 if trainer.tensor_parallel_size == 1 else 9  # and which of them are another rank's
    kept = ids * sizes.tokens if first else 0
    if last:
        of_token = shape.hidden * sizes.number + 8 + 5 * FLOAT32  # hidden states, label, statistics of its logits
        kept += _norm(shape, sizes) + sizes.tokens * of_token
    return kept


def _input(shape: Shape, sizes: Sizes) -> int:
    """A norm's output, which the projection behind it keeps."""
    return sizes.residual_tokens * shape.hidden * sizes.number


def _norm(shape: Shape, sizes: Sizes) -> int:
    """The input in fp32, its inverse root mean square, and the input normalised."""
    return sizes.residual_tokens * (shape.hidden * (FLOAT32 + sizes.number) + FLOAT32)


def _attention(sizes: Sizes) -> int:
    """Queries, keys, values, outputs and log-sum-exps of scaled_dot_product_attention, and indices around it."""
    log_sums = FLOAT32 * sizes.tokens * sizes.heads
    if sizes.pairs:  # keys and values of everybody, their order, and a mask of numbers for each response
        numbers = 2 * sizes.tokens * sizes.query + 2 * sizes.context * sizes.key + sizes.pairs
        return numbers * sizes.number + log_sums + 8 * sizes.context
    # Outputs twice: side by side and in a row. Two indices of 8 bytes and a mask of 1. (Responses of unlike lengths
    # side by side are padded: up to a third more, which is not counted.)
    return sizes.tokens * ((3 * sizes.query + 2 * sizes.key) * sizes.number + 17) + log_sums


def _attention_again(sizes: Sizes) -> int:
    """Queries and keys turned by their positions, and the values, which are a view of what the projection made."""
    return sizes.tokens * (sizes.query + sizes.key + sizes.projected) * sizes.number


def _norms_of_heads(sizes: Sizes, *, projected_is_kept: bool) -> int:
    """What the norms of queries and keys keep: as `_norm`, but that fp32 inputs are no copies made for them. Those are
    what the projection made, and queries once more where the keys and values of several groups lay between them."""
    columns = sizes.query + sizes.key
    inputs = columns
    if sizes.number == FLOAT32:
        inputs = (0 if projected_is_kept else sizes.projected) + (sizes.query if sizes.key_heads > 1 else 0)
    return sizes.tokens * (columns * sizes.number + (inputs + sizes.heads + sizes.key_heads) * FLOAT32)


def _mlp(sizes: Sizes) -> int:
    """Gate and up as projected, silu(gate), up + 0 (Megatron's offset makes a copy), and their product."""
    return 5 * sizes.tokens * sizes.inner * sizes.number


def in_flight(trainer: TrainerConfig, seat: Seat, micro_batches: int) -> int:
    """Forward passes of a chunk whose backward has not run yet, at most: 1F1B, interleaved with several chunks."""
    stages, chunks = trainer.pipeline_parallel_size, trainer.pipeline_chunks
    if chunks == 1:
        return min(stages - seat.stage, micro_batches)
    return min(2 * (stages - seat.stage - 1) + (chunks - 1) * stages + 1, chunks * micro_batches)


def layer_backward_bytes(
    shape: Shape, trainer: TrainerConfig, sizes: Sizes, held: Sequence[Held], *, on_cpu: bool
) -> int:
    """The most that backward takes inside one layer or the embedding: what it computes again, a weight's gradient
    before it is added to the fp32 one, and gradients of the MLP's activations."""
    again = layer_bytes(shape, trainer, sizes, recompute=False) - layer_bytes(shape, trainer, sizes)
    weight = max(one.elements for one in held) * (sizes.number + _widened(sizes, on_cpu))
    gathered = sizes.tokens * shape.hidden * sizes.number if trainer.sequence_parallel else 0
    return max(again, 0) + weight + gathered + 4 * sizes.tokens * sizes.inner * sizes.number


def logits_bytes(shape: Shape, trainer: TrainerConfig, sizes: Sizes, *, on_cpu: bool) -> int:
    """The most that backward of the log-probabilities takes: the fp32 gradient of the output layer, that of the hidden
    states, a chunk's logits, and what is made of these: a block in fp32, or some rows of a chunk's weight gradient."""
    rows = shape.padded_vocab(trainer.tensor_parallel_size) // trainer.tensor_parallel_size
    chunk = rows * min(trainer.logits_chunk, sizes.tokens)
    made = 2 * FLOAT32 * min(BLOCK, chunk)
    if sizes.number < FLOAT32:
        made = max(made, min(rows, ROWS) * shape.hidden * (sizes.number + _widened(sizes, on_cpu)))
    return (rows * FLOAT32 + sizes.tokens * sizes.number) * shape.hidden + chunk * sizes.number + made


def _widened(sizes: Sizes, on_cpu: bool) -> int:
    """Bytes of each number that is added to an fp32 sum: on a CPU torch makes an fp32 tensor of it first."""
    return FLOAT32 if on_cpu and sizes.number < FLOAT32 else 0
