"""Plans for Qwen2.5-32B on 8 and 128 GPUs: bytes against sums worked out from shards, without rectangles."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Shape
from megatron_rl.resharding.placement import aligned_step, engines_on
from megatron_rl.resharding.plan import Across, Plan, Ranks, plan
from megatron_rl.resharding.report import Bandwidths, Report

QWEN = Shape(
    layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064, tied=False
)  # fmt: skip

SPLIT_LAYER = 2 * (5120 * (5120 + 2 * 1024) + (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27648)
"""Bytes of a layer that TP splits: query, key and value with their biases, their output, and the MLP."""

WHOLE_LAYER, WHOLE_END = 2 * 2 * 5120, 2 * 5120
"""Bytes that every TP rank has: two norms of a layer, and the one behind all layers."""

VOCABULARY = 2 * 152064 * 5120
"""Bytes of the embedding, and of the output layer, which TP splits too."""

Case = tuple[int, int, int, int]
"""TP, PP and DP of the trainer, TP of the engines."""

CASES: list[Case] = [(8, 4, 4, 4), (4, 8, 4, 4), (4, 8, 4, 8), (8, 1, 1, 4), (4, 2, 1, 4)]
STEPS = [(case, step) for case in CASES for step in (1, 2) if step * case[3] <= 8]


def layouts(case: Case, step: int) -> tuple[Layout, Layout]:
    tp, pp, dp, engine = case
    source = Layout(side="megatron", shape=QWEN, tensor=tp, pipeline=pp, data=dp)
    return source, engines_on(source, engine, step=step)


def common(case: Case, stage: int, tp_rank: int, place: int) -> int:
    """Bytes that a TP rank of a stage of the trainer has of what the engine's place keeps.

    All split tensors are split into equal shares of heads, columns or rows, so shares overlap as intervals of the
    unit interval do.
    """
    tp, pp, _, engine = case
    overlap = max(0.0, min((tp_rank + 1) / tp, (place + 1) / engine) - max(tp_rank / tp, place / engine))
    split = 64 // pp * SPLIT_LAYER + VOCABULARY * ((stage == 0) + (stage == pp - 1))
    return round(overlap * split) + 64 // pp * WHOLE_LAYER + WHOLE_END * (stage == pp - 1)


def places(case: Case, step: int) -> list[int]:
    """The place in its engine of each GPU: every step-th GPU of a block of `step` engines."""
    tp, pp, dp, engine = case
    return [gpu % (engine * step) // step for gpu in range(tp * pp * dp)]


def expected(case: Case, step: int, across: Across) -> tuple[list[int], list[int], Ranks]:
    """Bytes that each GPU keeps and has, and that must come into each node."""
    tp, pp, dp, engine = case
    of_gpu = places(case, step)
    whole = 64 * WHOLE_LAYER + WHOLE_END
    kept = [(64 * SPLIT_LAYER + 2 * VOCABULARY) // engine + whole for _ in of_gpu]
    local = [common(case, gpu // (tp * dp), gpu % tp, place) for gpu, place in enumerate(of_gpu)]
    nodes = np.zeros(-(-len(of_gpu) // 8), np.int64)
    for node in range(len(nodes)):
        gpus = range(node * 8, min(node * 8 + 8, len(of_gpu)))
        stages, ranks = {gpu // (tp * dp) for gpu in gpus}, {gpu % tp for gpu in gpus}
        assert ranks == set(range(tp))  # so a node has all of a stage, or nothing of it
        wanted = [of_gpu[gpu] for gpu in gpus] if across == "direct" else sorted({of_gpu[gpu] for gpu in gpus})
        copies = len(gpus) if across == "direct" else 1  # of what TP does not split
        for stage in set(range(pp)) - stages:
            split = 64 // pp * SPLIT_LAYER + VOCABULARY * ((stage == 0) + (stage == pp - 1))
            nodes[node] += len(wanted) * split // engine
            nodes[node] += copies * (64 // pp * WHOLE_LAYER + WHOLE_END * (stage == pp - 1))
    return kept, local, nodes


def report(planned: Plan) -> Report:
    return Report(planned, Bandwidths(within=400e9, across=50e9))


@pytest.mark.parametrize("across", ["direct", "once"])
@pytest.mark.parametrize(("case", "step"), STEPS)
def test_nobody_receives_more_than_it_must(case: Case, step: int, across: Across) -> None:
    begun = time.process_time()  # other processes may load the machine
    planned = plan(*layouts(case, step), across=across)
    assert time.process_time() - begun < 1
    kept, local, into_nodes = expected(case, step, across)
    found = report(planned)
    assert found.kept.tolist() == kept
    assert found.local.tolist() == local
    assert found.received.tolist() == [keeps - has for keeps, has in zip(kept, local, strict=True)]
    assert found.received_across.reshape(-1, 8).sum(1).tolist() == into_nodes.tolist()
    assert found.sent.sum() == found.received.sum()


@pytest.mark.parametrize("across", ["direct", "once"])
@pytest.mark.parametrize(("case", "step"), STEPS)
def test_gpus_that_hold_the_same_bytes_send_alike(case: Case, step: int, across: Across) -> None:
    tp, pp, dp, _ = case
    sent = report(plan(*layouts(case, step), across=across)).sent.reshape(pp, dp, tp)
    assert (sent.max(1) <= 1.05 * sent.min(1)).all()


def test_the_placement_with_the_most_overlap_is_chosen() -> None:
    steps = {case: aligned_step(layouts(case, 1)[0], case[3], gpus_per_node=8) for case in CASES}
    assert steps == {(8, 4, 4, 4): 2, (4, 8, 4, 4): 1, (4, 8, 4, 8): 1, (8, 1, 1, 4): 2, (4, 2, 1, 4): 1}
    received = [report(plan(*layouts((8, 1, 1, 4), step))).received.mean() / 1e9 for step in (1, 2)]
    assert received == pytest.approx([14.3, 8.2], abs=0.05)


def test_the_command_prints_it(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    sizes = ["--hf-config", str(file), "--trainer", "tp=8,pp=4,dp=4", "--engine", "tp=4", "--gpus-per-node", "8"]
    for placement, step in (("consecutive", 1), ("aligned", 2)):
        done = CliRunner().invoke(app, ["plan", "reshard", *sizes, "--placement", placement, "--json"])
        assert done.exit_code == 0, done.output
        ranks = json.loads(done.output)["ranks"]
        kept, local, _ = expected((8, 4, 4, 4), step, "direct")
        assert [rank["rank"] for rank in ranks] == list(range(128))
        assert [rank["kept"] for rank in ranks] == kept
        assert [rank["local"] for rank in ranks] == local
        assert all(rank["received"] == rank["kept"] - rank["local"] for rank in ranks)
        assert all(0 < rank["received_across_nodes"] < rank["received"] for rank in ranks)
    text = CliRunner().invoke(app, ["plan", "reshard", *sizes]).output
    assert "TP8 × PP4 × DP4 on 128 GPUs → 32 engines of TP4, the first on GPUs [0, 2, 4, 6]" in text
    assert re.search(r"^received +14.24 +14.33 +14.43$", text, re.MULTILINE)
    assert "65.53 GB to every GPU, 4.6 times as much" in text
