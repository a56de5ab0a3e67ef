"""What a plan of a resharding costs, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl.resharding.names import hf_shapes
from megatron_rl.resharding.plan import Plan, Ranks

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Bytes a second that a GPU sends and, at the same time, receives."""

    within: float
    """To GPUs of its node."""

    across: float
    """To other nodes."""


class Report:
    """Bytes of a plan, for each GPU that keeps any."""

    def __init__(self, planned: Plan, bandwidths: Bandwidths) -> None:
        """Count.

        Args:
            planned: the plan.
            bandwidths: for the seconds.
        """
        self.plan, self.bandwidths = planned, bandwidths
        moved, within = ~planned.local, ~planned.local & ~planned.across
        every = np.ones_like(planned.local)
        self.kept: Ranks = planned.total(planned.receiver, every) + planned.padding
        self.local: Ranks = planned.total(planned.receiver, planned.local) + planned.padding
        self.received: Ranks = planned.total(planned.receiver, moved)
        self.received_across: Ranks = planned.total(planned.receiver, planned.across)
        self.sent: Ranks = planned.total(planned.sender, moved)
        self._within = [planned.total(side, within) for side in (planned.sender, planned.receiver)]
        self._across = [planned.total(side, planned.across) for side in (planned.sender, planned.receiver)]

    @cached_property
    def seconds(self) -> float:
        """At the bandwidths, if every link were busy until its GPU is done: a lower bound."""
        within, across = np.maximum(*self._within), np.maximum(*self._across)
        return float((within / self.bandwidths.within + across / self.bandwidths.across).max())

    @cached_property
    def gathered(self) -> int:
        """Bytes that a GPU receives when every tensor is gathered in full on every GPU, next to none its own."""
        return sum(map(math.prod, hf_shapes(self.plan.source.shape).values())) * self.plan.itemsize

    def as_json(self) -> dict[str, Any]:
        """Everything, in bytes, with an object for each GPU that keeps something."""
        busiest = int(self.sent.argmax())
        keeps = np.flatnonzero(self.kept).tolist()
        return {
            "gpus": self.plan.world,
            "buckets": self.plan.buckets,
            "busiest_sender": {"rank": busiest, "sent": int(self.sent[busiest])},
            "full_gather": self.gathered,
            "seconds": self.seconds,
            "ranks": [
                {
                    "rank": rank,
                    "kept": int(self.kept[rank]),
                    "local": int(self.local[rank]),
                    "received": int(self.received[rank]),
                    "received_across_nodes": int(self.received_across[rank]),
                    "sent": int(self.sent[rank]),
                }
                for rank in keeps
            ],
        }

    def as_text(self) -> str:
        """A table of bytes for each GPU, and a few lines below it."""
        keeps = self.kept > 0
        minimum = self.kept - self.local
        rows = [
            ("kept", self.kept),
            ("  of it local", self.local),
            ("received", self.received),
            ("  at least (kept − local)", minimum),
            ("  within the node", self.received - self.received_across),
            ("  from other nodes", self.received_across),
            ("sent", self.sent),
        ]
        lines = [f"{'GB of a GPU':28}{'fewest':>10}{'mean':>10}{'most':>10}"]
        for name, counts in rows:
            of = counts[keeps] / GB if name != "sent" else counts / GB
            lines.append(f"{name:28}{of.min():>10.2f}{of.mean():>10.2f}{of.max():>10.2f}")
        busiest = int(self.sent.argmax())
        received = self.received[keeps].mean()
        times = f", {self.gathered / received:.1f} times as much" if received else ""
        lines += [
            f"busiest sender: GPU {busiest}, {self.sent[busiest] / GB:.2f} GB",
            f"buckets: {self.plan.buckets}",
            f"at least {self.seconds:.2f} s at {self.bandwidths.within / GB:g} GB/s within a node and "
            f"{self.bandwidths.across / GB:g} GB/s between nodes",
            f"a full gather would bring {self.gathered / GB:.2f} GB to every GPU{times}",
        ]
        return "\n".join(lines)
