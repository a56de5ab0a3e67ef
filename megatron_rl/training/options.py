"""The trainer's options."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.section import NotNegative, Positive, Section

Adam = Literal["transformer_engine", "apex", "torch"]


class ImplementationConfig(Section):
    """What computes. `auto`: the fastest that is installed; anything else is used, or the run is refused."""

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """`local`: Megatron's own layers with torch's attention; they run everywhere."""

    attention: Literal["auto", "flash", "fused"] = "auto"
    """What Transformer Engine's attention may use. Local layers have torch's scaled_dot_product_attention."""

    adam: Literal["auto"] | Adam = "auto"
    """Whose Adam."""

    fused_gradients: bool | None = None
    """Weight gradients are added to the fp32 gradients by the matrix product that makes them, with Apex's extension;
    `null`: where that is installed."""

    logprobs: Literal["auto", "eager", "compiled"] = "auto"
    """Log-probabilities and entropies: `eager` PyTorch, or `compiled` by torch.compile, as `auto` has it on a GPU."""

    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Matrix products of the layers in FP8, scaled so (needs Transformer Engine); `null`: in `trainer.dtype`."""


class MemoryConfig(Section):
    """What is kept in the device's memory, and what is computed again or fetched instead."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again: none; those of `recompute_modules`; all but each layer's input."""

    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ("mlp",)
    """For `selective`. Attention that never holds its scores, as all here, keeps little that is worth it."""

    offload_while_sampling: bool = True
    """While engines sample, drop gradients and keep parameters and optimizer state in pinned host memory."""

    optimizer_on_host: bool = False
    """The optimizer's state lives in host memory and is updated there, by Megatron's hybrid optimizer. Needs bfloat16
    and `distributed_optimizer`."""


class TrainerConfig(Section):
    """Megatron-core: layout, precision, optimizer."""

    tensor_parallel_size: Positive = 1
    """Megatron TP."""

    pipeline_parallel_size: Positive = 1
    """Megatron PP. What TP × PP × CP leaves of the world size is data parallel."""

    context_parallel_size: Positive = 1
    """Megatron CP: ranks that split the tokens of every response."""

    pipeline_chunks: Positive = 1
    """Parts of the model that each pipeline stage holds: above 1 the interleaved schedule, with smaller bubbles."""

    sequence_parallel: bool = False
    """Split norms and residuals over TP along the sequence; needs TP > 1."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations; gradients and optimizer state are float32."""

    max_tokens_per_micro_batch: Positive | None = 22528
    """Most tokens in a forward pass, prompts and padding too, on all context-parallel ranks together; a longer response
    gets one of its own. By default a longest prompt and response; `null`: `micro_batch_size` decides."""

    micro_batch_size: Positive | None = None
    """Most responses in a forward pass; `null`: as many as fit."""

    logits_chunk: Positive = 1024
    """Tokens whose logits exist at once, in fp32 and over the whole vocabulary: fewer take less memory."""

    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""

    overlap_grad_reduce: bool = True
    """Sum gradients over data-parallel ranks while backward still runs."""

    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate, constant after the warm-up."""

    lr_warmup_steps: NotNegative = 0
    """Linear warm-up, in optimizer steps (not rollout steps, not micro-batches)."""

    lr_warmup_rollout_steps: NotNegative = 0
    """The same in rollout steps of `algorithm.updates_per_rollout` optimizer steps each; set one of the two."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW."""

    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest global norm of the gradient; 0: no clipping."""

    implementation: ImplementationConfig = ImplementationConfig()
    memory: MemoryConfig = MemoryConfig()
