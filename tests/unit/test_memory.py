"""The formula for every byte, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.resharding.names import Shape
from megatron_rl.training.buffers import Bucket, Seat, held_parameters, lay_out
from megatron_rl.training.memory import Memory, memory
from megatron_rl.training.options import TrainerConfig

QWEN_32B = Shape(
    layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064, tied=False
)
TINY = Shape(layers=2, hidden=10, heads=2, kv_heads=1, head_dim=4, intermediate=8, vocab=7, tied=False)
LONGEST = (2048 + 20480,)


def of(shape: Shape, seat: Seat | None = None, *, micro_batches: int = 1, **trainer: Any) -> Memory:
    options = TrainerConfig.model_validate(trainer)
    return memory(shape, options, seat or Seat(), lengths=LONGEST, micro_batches=micro_batches)


def only_chunk(shape: Shape, trainer: TrainerConfig, seat: Seat) -> list[Bucket]:
    (chunk,) = held_parameters(shape, trainer, seat.stage)
    return lay_out(chunk, trainer, seat)


def test_qwen_32b_on_one_rank():
    found = of(QWEN_32B, distributed_optimizer=False)
    elements = 32_763_876_352  # 2 × 152,064 × 5,120 + 64 × 487,598,080 + 5,120
    assert found.parameters == 2 * elements
    assert found.gradients == 4 * elements
    tensors = 64 * 7 + 3
    assert found.optimizer == 12 * elements + 4 * tensors
    assert found.training > 18 * elements
    assert found.asleep == 0
    assert found.host == 14 * elements + 4 * tensors


def test_tensor_parallelism_splits_all_but_norms():
    norms = 129 * 5120
    assert of(QWEN_32B, distributed_optimizer=False, tensor_parallel_size=8).gradients == 4 * (
        (32_763_876_352 - norms) // 8 + norms
    )


def test_stages_and_chunks_hold_all_layers_once():
    trainer = TrainerConfig(pipeline_parallel_size=4, pipeline_chunks=2)
    stages = [held_parameters(QWEN_32B, trainer, stage) for stage in range(4)]
    assert [[len(chunk) for chunk in stage] for stage in stages] == [[57, 56], [56, 56], [56, 56], [56, 58]]
    assert sum(held.elements for stage in stages for chunk in stage for held in chunk) == 32_763_876_352


def test_parameters_begin_at_multiples_of_64_and_replicas_share_evenly():
    # The last first: output 70, final norm 10, then of each layer MLP down 80, up and gate 160, norm 10, QKV bias 16,
    # QKV 160, projection 80, norm 10; embedding 70. Each is rounded up to 64.
    begun = [0, 128, 192, 320, 512, 576, 640, 832, 960, 1024, 1152, 1344, 1408, 1472, 1664, 1792, 1856]
    trainer = TrainerConfig()
    for replicas, end in ((1, 2048), (2, 2048), (3, 2304)):  # 1,926 up to a multiple of 128 and of the replicas
        (bucket,) = only_chunk(TINY, trainer, Seat(replicas=replicas))
        assert [place.start for _, place in bucket.members] == begun
        assert bucket.span == range(end)
    thirds = [sum(elements for _, elements in bucket.share(Seat(replica=replica, replicas=3))) for replica in range(3)]
    # Of 768 each: 70 + 10 + 80 + 160 + 10 + 16 + 128 of QKV; 32 + 80 + 10 + 80 + 160 + 10 + 16 + 64 of QKV;
    # 96 + 80 + 10 + 70.
    assert thirds == [474, 452, 256]


def test_a_copied_embedding_has_a_bucket_of_its_own_on_both_stages():
    trainer = TrainerConfig(pipeline_parallel_size=2)
    tied = replace(TINY, tied=True)
    spans = [[bucket.span for bucket in only_chunk(tied, trainer, Seat(stage=stage))] for stage in (0, 1)]
    assert spans == [[range(896), range(896, 1024)], [range(128), range(128, 1024)]]


def test_reducing_during_backward_cuts_the_first_stage_into_buckets_of_40_million():
    trainer = TrainerConfig(tensor_parallel_size=8, pipeline_parallel_size=8)
    first, last = (only_chunk(QWEN_32B, trainer, Seat(stage=stage)) for stage in (0, 7))
    # A layer: MLP 17,694,720 + 35,389,440, which is enough; then 5,120 + 896 + 4,587,520 + 3,276,800 + 5,120.
    # That and the next MLP's 17,694,720 + 35,389,440 are the second bucket, and so on; the rest and the embedding.
    assert len(first) == 9
    assert [len(bucket.span) for bucket in first[:2]] == [53_084_160, 60_959_616]
    assert len(last) == 1


@pytest.mark.parametrize(("stage", "micro_batches", "in_flight"), [(0, 9, 4), (1, 9, 3), (1, 2, 2)])
def test_earlier_stages_keep_more_micro_batches(stage: int, micro_batches: int, in_flight: int):
    one = of(QWEN_32B, Seat(stage=stage), pipeline_parallel_size=4)
    several = of(QWEN_32B, Seat(stage=stage), pipeline_parallel_size=4, micro_batches=micro_batches)
    assert several.activations == in_flight * one.activations


def test_full_recompute_keeps_the_input_of_each_layer():
    tokens = LONGEST[0]  # ids and whose they are; the final norm; hidden states, labels and five statistics
    kept = of(QWEN_32B, tensor_parallel_size=8, memory={"recompute": "full"}).activations
    ends = tokens * (9 + 5120 * 6 + 4 + 5120 * 2 + 28)
    assert kept == 64 * tokens * 5120 * 2 + ends


def test_what_a_layer_keeps():
    # bf16, TP 2, 100 tokens. Norms: 2 × (6 + 2) × 10 + 2 × 4; rotary 4 × 4 × 2; attention (3 × 4 + 2 × 2) × 2 + 17
    # + 4 × 1 head; its output 4 × 2; MLP 5 × 4 × 2. With the ends of the test above.
    two_groups = replace(TINY, kv_heads=2)
    found = memory(two_groups, TrainerConfig(tensor_parallel_size=2), Seat(), lengths=(60, 40)).activations
    layer = 160 + 8 + 32 + (12 + 8) * 2 + 17 + 4 + 8 + 40
    assert found == 100 * (2 * layer + 9 + 10 * 6 + 4 + 10 * 2 + 28)


def test_what_a_layer_of_qwen3_keeps_when_tp_goes_through_its_key_head():
    # As above, but one key head on both ranks; then norms of heads, 4 wide, of one query and one key head: copies in
    # fp32, normalised, inverse root mean squares.
    qwen3 = replace(TINY, family="qwen3")
    trainer = TrainerConfig(tensor_parallel_size=2)
    found = memory(qwen3, trainer, Seat(), lengths=(60, 40)).activations
    layer = 160 + 8 + 32 + (12 + 8) * 2 + 17 + 4 + 8 + 40 + (4 + 4) * (4 + 2) + 2 * 4
    ends = 9 + 10 * 6 + 4 + 10 * 2 + 28
    assert found == 100 * (2 * layer + ends)
    # In fp32 they normalise what was projected, on both ranks: two query heads, a key head and a value head.
    wide = memory(qwen3, trainer.model_copy(update={"dtype": "float32"}), Seat(), lengths=(60, 40)).activations
    layer = 4 * (60 + 16 + (12 + 8) + 4 + 20) + 8 + 17 + 4 + 4 * (16 + 4 + 4) + 2 * 4
    assert wide == 100 * (2 * layer + 9 + 10 * 8 + 4 + 10 * 4 + 28)


def test_the_optimizer_on_the_host_has_a_copy_of_the_gradients_there():
    host, device = of(QWEN_32B, memory={"optimizer_on_host": True}), of(QWEN_32B)
    assert host.optimizer == 0
    assert host.optimizer_on_host == pytest.approx(device.optimizer * 16 / 12)


def test_a_trainer_that_does_not_sleep_keeps_its_memory():
    found = of(QWEN_32B, memory={"offload_while_sampling": False})
    assert found.asleep == found.parameters + found.gradients + found.optimizer
    assert found.host == 0


def test_the_table_has_gigabytes():
    assert "| parameters | 65.53 |" in of(QWEN_32B, distributed_optimizer=False).table()
