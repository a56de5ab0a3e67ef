"""What a response costs to train on: the floating-point operations of its matrix products. Pure."""

from dataclasses import dataclass

from megatron_rl.resharding.names import Shape


@dataclass(frozen=True, kw_only=True)
class SequenceFlops:
    """FLOPs of a forward and backward pass over one sequence, as a polynomial in its tokens."""

    linear: int
    """Of each token: every weight matrix."""

    quadratic: int
    """Of each pair of tokens: attention."""

    def __call__(self, tokens: int) -> int:
        """FLOPs of a sequence of `tokens` tokens."""
        return (self.linear + self.quadratic * tokens) * tokens


def sequence_flops(shape: Shape) -> SequenceFlops:
    """FLOPs of a model of `shape`; norms, rotations, softmax and recomputation are left out.

    A multiply-add is 2 FLOPs. The backward pass costs twice the forward pass, for the gradients of both factors of
    every product; a lookup in the embedding costs nothing.
    """
    attention = shape.hidden * (shape.query + 2 * shape.key) + shape.query * shape.hidden  # q, k, v; output projection
    mlp = 3 * shape.hidden * shape.intermediate  # gate, up, down
    head = shape.hidden * shape.vocab  # computed at every token, tied or not
    # Queries by keys, then scores by values: `query` multiply-adds for a pair of tokens in each. Causal attention
    # needs half of the L² pairs.
    return SequenceFlops(
        linear=3 * 2 * (shape.layers * (attention + mlp) + head),
        quadratic=3 * 2 * shape.layers * (2 * shape.query) // 2,
    )
