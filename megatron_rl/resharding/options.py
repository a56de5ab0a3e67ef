"""How weights get from the trainer to the engines."""

from typing import Literal

from megatron_rl.section import Positive, Section


class ReshardConfig(Section):
    """Weights from the trainer's layout to the engines'."""

    method: Literal["plan", "gather"] = "plan"
    """`plan`: each GPU receives what it keeps and does not have, by a plan (docs/resharding.md). `gather`: every GPU
    receives every tensor whole; simpler, several times the bytes, and what the plan is compared with."""

    verify: Literal["always", "first", "never"] = "first"
    """`first`: the first update is done both ways, and all parameters of the engines compared; then, and with `always`
    in every update, what each engine loaded is compared with what was sent. A difference ends the run, by name."""

    across_nodes: Literal["direct", "once"] = "direct"
    """Between nodes: each GPU receives for itself, or each node receives a byte once and forwards it inside."""

    placement: Literal["aligned", "consecutive"] = "aligned"
    """The GPUs of an engine of several: every n-th one, so that the most of what it keeps is there already, or
    consecutive ones."""

    bucket_mb: Positive = 512
    """MiB that a GPU receives at a time; there are two buckets."""
