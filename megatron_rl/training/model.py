"""The policy: Megatron's GPTModel built from an HF config, its weights read by the table of names."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.config import TrainerConfig
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.names import Shape, pieces
from megatron_rl.resharding.shards import named_shards
from megatron_rl.training import cpu
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.layers import local_block_spec

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine: it imports and there is a GPU."""
    if not cpu.has_cuda():
        return False
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another CUDA or torch
        log.warning("Transformer Engine is not used: %s", error)
        return False
    return True


def transformer_config(spec: ModelSpec, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration of the model and its layout."""
    shape, dtype = spec.shape, DTYPES[trainer.dtype]
    on_gpu = cpu.has_cuda()
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
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=trainer.tensor_parallel_size,
        pipeline_model_parallel_size=trainer.pipeline_parallel_size,
        context_parallel_size=trainer.context_parallel_size,
        sequence_parallel=trainer.sequence_parallel,
        variable_seq_lengths=trainer.pipeline_parallel_size > 1,  # micro-batches are as long as their responses
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
        apply_rope_fusion=uses_transformer_engine(),
        masked_softmax_fusion=False,  # of an attention that is in neither spec
    )


def build_model(spec: ModelSpec, trainer: TrainerConfig) -> GPTModel:
    """This rank's part of the policy, parameters not yet set."""
    config = transformer_config(spec, trainer)
    if uses_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layers = get_gpt_layer_with_transformer_engine_spec()
    else:
        layers = local_block_spec(config)
    model = GPTModel(
        config,
        layers,
        vocab_size=spec.shape.padded_vocab(trainer.tensor_parallel_size),
        max_sequence_length=0,  # only learned position embeddings look at it
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.shape.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
    ).to(cpu.device())
    _mark_split_parameters(model, spec.shape)
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


def _mark_split_parameters(model: GPTModel, shape: Shape) -> None:
    """Say which parameters are split over TP and which are copies: the norm of the gradient counts copies once.

    Megatron does it while it initialises weights, which we leave out; unmarked, the parts on TP ranks above 0 would be
    missing from the norm, and clipping would depend on the layout.
    """
    for shard in named_shards(model, shape):
        for attribute, value in (
            ("tensor_model_parallel", shard.entry.fusion != "whole"),
            ("partition_dim", 1 if shard.entry.fusion == "columns" else 0),
            ("partition_stride", 1),
        ):
            setattr(shard.parameter, attribute, value)


@torch.no_grad()
def load_hf_weights(model: GPTModel, shape: Shape, directory: Path) -> None:
    """Fill this rank's parameters from HF safetensors, reading only its slices; vocabulary padding becomes 0.

    Raises:
        UserError: a tensor is missing or has another shape.
    """
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    with HfReader(directory, shape) as reader:
        for shard in named_shards(model, shape):
            shard.parameter.zero_()
            for piece in pieces(shard.entry, shard.layer, shape, tp_rank, tp_size):
                shard.parameter[piece.shard_rows].copy_(reader.read(piece.hf, piece.index))
