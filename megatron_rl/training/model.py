"""The policy: Megatron's GPTModel built from an HF config, its weights read by the table of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.resharding.megatron_files import open_weights
from megatron_rl.resharding.names import Shape
from megatron_rl.resharding.pieces import pieces
from megatron_rl.resharding.shards import named_shards
from megatron_rl.training import cpu
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.implementation import Implementation, choose
from megatron_rl.training.layers import local_block_spec
from megatron_rl.training.options import MemoryConfig, TrainerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(spec: ModelSpec, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration of the model and its layout."""
    shape, dtype = spec.shape, DTYPES[trainer.dtype]
    on_gpu, choice = cpu.has_cuda(), choose(trainer)
    pipeline, interleaved = trainer.pipeline_parallel_size > 1, trainer.pipeline_chunks > 1
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family == "qwen2",
        qk_layernorm=shape.family == "qwen3",  # and sum their gradients over TP: each rank has its own heads
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=trainer.tensor_parallel_size,
        pipeline_model_parallel_size=trainer.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=trainer.pipeline_chunks if interleaved else None,
        # Batched p2p of the interleaved schedule gives wrong gradients over gloo, without a word.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # What was sent on is not needed here. The interleaved schedule would free it while it is still being sent.
        deallocate_pipeline_outputs=pipeline and not interleaved,
        context_parallel_size=trainer.context_parallel_size,
        sequence_parallel=trainer.sequence_parallel,
        variable_seq_lengths=pipeline,  # micro-batches are as long as their responses
        moe_token_dispatcher_type="alltoall",  # the only one that variable lengths are allowed with
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every parameter is read from the checkpoint
        # Our losses are plain sums: no averaging over tokens, micro-batches or ranks.
        calculate_per_token_loss=True,
        # Fused by torch.compile: worth it on GPUs only.
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=choice.layers == "transformer_engine",
        gradient_accumulation_fusion=choice.fused_gradients,
        attention_backend=AttnBackend[trainer.implementation.attention],
        **_recompute(trainer.memory),
        **_fp8(choice),
        masked_softmax_fusion=False,  # of an attention that is in neither spec
    )


def _recompute(memory: MemoryConfig) -> dict[str, Any]:
    """Megatron's names for which activations are computed again."""
    if memory.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if memory.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(memory.recompute_modules)}
    return {}


def _fp8(choice: Implementation) -> dict[str, Any]:
    """Megatron's names for FP8: e5m2 gradients where one scale serves a whole tensor, e4m3 where scales are finer."""
    if choice.fp8 is None:
        return {}
    return {"fp8": "hybrid" if choice.fp8 == "tensorwise" else "e4m3", "fp8_recipe": choice.fp8}


def build_model(spec: ModelSpec, trainer: TrainerConfig) -> list[GPTModel]:
    """This rank's part of the policy, parameters not yet set: a GPTModel for each chunk, one without interleaving."""
    config = transformer_config(spec, trainer)
    chunks = [_build_chunk(config, spec, trainer, number) for number in range(trainer.pipeline_chunks)]
    _mark_split_parameters(chunks, spec.shape)
    return chunks


def _build_chunk(config: TransformerConfig, spec: ModelSpec, trainer: TrainerConfig, number: int) -> GPTModel:
    virtual = number if trainer.pipeline_chunks > 1 else None
    if choose(trainer).layers == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layers = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        layers = local_block_spec(config, virtual)
    model = GPTModel(
        config,
        layers,
        vocab_size=spec.shape.padded_vocab(trainer.tensor_parallel_size),
        max_sequence_length=0,  # only learned position embeddings look at it
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        vp_stage=virtual,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.shape.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        rope_scaling=spec.rope_factor is not None,
        rope_scaling_factor=spec.rope_factor,
    ).to(cpu.device())
    if model.post_process:
        model.output_layer.forward = _leave_projection  # the loss projects, a chunk of tokens at a time
    return model


def _leave_projection(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    return hidden, None


def all_tokens(output: Tensor, model: GPTModel) -> Tensor:
    """What the last pipeline stage puts out, `[1, tokens, hidden]`: of all tokens on every TP rank, `[tokens, hidden]`.

    Backward sums over TP: each rank's columns of the vocabulary give a part of the gradient.
    """
    hidden = output[0]
    if model.config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden)
    return copy_to_tensor_model_parallel_region(hidden)


def output_weight(model: GPTModel) -> Tensor:
    """This TP rank's rows of the output layer, `[padded vocabulary / tp, hidden]`."""
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )


def _mark_split_parameters(chunks: Sequence[GPTModel], shape: Shape) -> None:
    """Say which parameters are split over TP and which are copies: the norm of the gradient counts copies once.

    Megatron does it while it initialises weights, which we leave out; unmarked, the parts on TP ranks above 0 would be
    missing from the norm, and clipping would depend on the layout.
    """
    for shard in named_shards(chunks, shape):
        for attribute, value in (
            ("tensor_model_parallel", shard.entry.fusion != "whole"),
            ("partition_dim", 1 if shard.entry.fusion == "columns" else 0),
            ("partition_stride", 1),
        ):
            setattr(shard.parameter, attribute, value)


@torch.no_grad()
def load_weights(chunks: Iterable[GPTModel], shape: Shape, directory: Path) -> None:
    """Fill this rank's parameters from HF safetensors or a Megatron checkpoint, reading only its slices; vocabulary
    padding becomes 0.

    Raises:
        UserError: a tensor is missing or has another shape.
    """
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    with open_weights(directory, shape) as reader:
        for shard in named_shards(chunks, shape):
            shard.parameter.zero_()
            for piece in pieces(shard.entry, shard.layer, shape, tp_rank, tp_size):
                shard.parameter[piece.shard_rows].copy_(reader.read(piece.hf, piece.index))
