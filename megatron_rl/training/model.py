"""The policy: Megatron's GPTModel built from an HF config, its weights read by the table of names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import TrainerConfig
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.names import Entry, Shape, entries, pieces
from megatron_rl.training import cpu
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.layers import local_block_spec
from megatron_rl.training.setup import known_arguments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine: it imports and there is a GPU."""
    if not cpu.has_cuda():
        return False
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
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
        sequence_parallel=trainer.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every parameter is read from the checkpoint
        # Our losses are plain sums: no averaging over tokens, micro-batches or ranks.
        calculate_per_token_loss=True,
        # Kernels that exist on GPUs only.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=uses_transformer_engine(),
        persist_layer_norm=on_gpu,
        **known_arguments(TransformerConfig, async_tensor_model_parallel_allreduce=False),
    )


def build_model(spec: ModelSpec, trainer: TrainerConfig) -> GPTModel:
    """This rank's part of the policy, parameters not yet set."""
    config = transformer_config(spec, trainer)
    if uses_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layers = get_gpt_layer_with_transformer_engine_spec()
    else:
        layers = local_block_spec(config)
    return GPTModel(
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


@dataclass(frozen=True)
class NamedShard:
    """A parameter of this rank with its line in the table."""

    entry: Entry
    layer: int
    parameter: torch.nn.Parameter


def named_shards(model: GPTModel, shape: Shape) -> Iterator[NamedShard]:
    """Every parameter of this rank, in the order of `names.parameters`.

    Raises:
        KeyError: the model has a parameter that the table doesn't know.
    """
    table = {name: entry for entry in entries(shape) for name in (entry.megatron, entry.te) if name}
    if shape.tied:  # with PP, the last stage keeps a copy of the embedding under this name
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    offset = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    for name, parameter in model.named_parameters():
        generic, layer = name, -1
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            generic, layer = "decoder.layers.{layer}." + rest, int(number) + offset
        yield NamedShard(table[generic], layer, parameter)


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


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model
