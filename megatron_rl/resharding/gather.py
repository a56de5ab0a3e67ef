"""The golden path: every tensor gathered whole, on every rank, in HF's names.

Simple and right, and the most bytes that anyone could move; faster paths are measured and tested against it.
"""

from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.resharding.names import Entry, Shape, parameters, stage_of
from megatron_rl.resharding.pieces import pieces, shard_shape
from megatron_rl.resharding.shards import named_shards


@torch.no_grad()
def gather_hf(
    chunks: Collection[GPTModel],
    shape: Shape,
    read: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.data,
) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors one after another. A collective: every rank of a TP × PP block iterates to the end.

    Args:
        chunks: of the model, that this rank holds.
        shape: of the whole model.
        read: what of each parameter is gathered (its data, its gradient, ...); same dtype everywhere.

    Yields:
        (HF name, tensor on this rank's device), in forward order, each rank the same. Memory holds one
        parameter at a time, twice: its shards and what is made of them.
    """
    mine = {(shard.entry.megatron, shard.layer): shard.parameter for shard in named_shards(chunks, shape)}
    tp_size, pp_size = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    some = read(next(iter(mine.values())))
    for entry, layer in parameters(shape):
        owner = stage_of(entry, layer, shape, pp_size, len(chunks))
        shards = [some.new_empty(shard_shape(entry, shape, tp_size)) for _ in range(tp_size)]
        if owner == mpu.get_pipeline_model_parallel_rank():
            shard = read(mine[entry.megatron, layer]).contiguous()
            if tp_size == 1:
                shards = [shard]
            else:
                dist.all_gather(shards, shard, group=mpu.get_tensor_model_parallel_group())
        if pp_size > 1:
            group = mpu.get_pipeline_model_parallel_group()
            for shard in shards:
                dist.broadcast(shard, group=group, group_src=owner)
        yield from assemble(entry, layer, shape, shards).items()


def assemble(entry: Entry, layer: int, shape: Shape, shards: list[Tensor]) -> dict[str, Tensor]:
    """The whole HF tensors of a parameter, from the shards of all TP ranks in order."""
    whole = {tensor.name.format(layer=layer): shards[0].new_empty(tensor.size(shape)) for tensor in entry.hf}
    for rank, shard in enumerate(shards):
        for piece in pieces(entry, layer, shape, rank, len(shards)):
            whole[piece.hf][piece.index] = shard[piece.shard_rows]
    return whole
