"""Options of sampling, and of the SGLang servers: typed, frozen, documented by the text under each."""

import ipaddress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.section import NotNegative, Positive, Seconds, Section

OURS = (
    "--model-path --host --port --tp-size --tensor-parallel-size --tp --mem-fraction-static --weight-version "
    "--api-key --admin-api-key --config --dtype --load-format --skip-tokenizer-init --enable-memory-saver "
    "--enable-deterministic-inference --random-seed --enable-weights-cpu-backup --custom-weight-loader"
).split()
"""Arguments of the server that follow from other options, or are secret."""

DETERMINISTIC_BACKENDS = "ascend fa3 fa4 flashinfer intel_xpu triton".split()
"""Attention backends whose results don't depend on the batch: DETERMINISTIC_ATTENTION_BACKEND_CHOICES in
sglang/srt/arg_groups/choices.py of SGLang 0.5.23. Unless one is named, SGLang takes one of them."""


class SglangConfig(Section):
    """How a rollout engine's SGLang server is started and asked."""

    python: Path | None = None
    """Interpreter that has sglang, of another virtual environment perhaps; `null`: the one that runs this program."""

    host: str = "127.0.0.1"
    """Address that servers listen on: loopback, or a private address of the node; with several nodes loopback."""

    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of a node's first server, the next ones take those after it; `null`: any that are free."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Part of the GPU's memory for weights and key-value cache. The trainer sleeps meanwhile; what CUDA and NCCL work
    in stays."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of `sglang.launch_server`, as on its command line."""

    environment: dict[str, str] = Field(default={})
    """Variables for the server. Of this program's own it gets few: not torchrun's, and none that sets threads."""

    start_timeout_s: Seconds = 900
    """How long a server may take until it is healthy. Large models, and CUDA graphs, take minutes."""

    request_timeout_s: Seconds = 3600
    """How long one prompt's responses may take together, time in the server's queue included; one that takes longer is
    taken for hung, and started again."""

    hung_after_s: Seconds = 120
    """A server from which no token has come for so long while some are awaited is taken for hung, and started again."""

    max_concurrent_prompts: Positive = 512
    """Prompts that a server is asked for at once; it queues what doesn't fit its cache."""

    @field_validator("host")
    @classmethod
    def _is_private(cls, host: str) -> str:
        """Refuse addresses that the world could reach: a server takes new weights from whoever has its key."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"{host!r} is not an IP address; give the node's, or 127.0.0.1") from None
        if address.is_unspecified or not (address.is_private or address.is_loopback):
            raise ValueError(f"{host} is not a private address; give the node's own private one, or 127.0.0.1")
        return host

    @field_validator("extra_args")
    @classmethod
    def _are_not_ours(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what other options say."""
        for argument in arguments:
            if argument.split("=")[0] in OURS:
                raise ValueError(f"{argument.split('=')[0]} is set by the program; leave it out")
        return arguments

    @property
    def attention_backend(self) -> str | None:
        """What `extra_args` say of it; the last one counts, as for SGLang."""
        named = None
        for argument, following in pairwise((*self.extra_args, "")):
            name, is_assigned, value = argument.partition("=")
            if name == "--attention-backend":
                named = value if is_assigned else following
        return named


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: a batched PyTorch sampler inside each rank; `sglang`: servers beside the ranks (docs/sglang.md)."""

    tensor_parallel_size: Positive = 1
    """Ranks that share one engine, all on one node. The embedded engine runs on one."""

    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: engines sample on the trainer's ranks, in turn with it; `separate`: on the last `ranks` ranks, which
    do nothing else, and nobody sleeps."""

    ranks: NotNegative = 0
    """With `placement: separate`: how many ranks sample; the others train."""

    async_steps: Literal[0, 1] = 0
    """1: while a step is trained on, the next one is sampled, with the weights from before (one step off-policy). Needs
    `placement: separate`, and turns `algorithm.correction` on unless you set it."""

    sglang: SglangConfig = SglangConfig()
    """How SGLang's servers are started and asked; for `engine: sglang`."""

    deterministic: bool = False
    """Each response depends on its own seed only. The embedded engine always does so. SGLang: deterministic inference
    (batch-invariant kernels), which costs roughly a third of the speed (their figure: 34% on average) and not every
    attention backend has; without it no seed is promised."""

    parity_limit: Annotated[float, Field(gt=0)] | None = None
    """After each update engine and trainer score a probe; the run ends if their log-probs differ by more than this, in
    nats, mean over tokens. `null`: by `trainer.dtype`, 0.001 (float32) or 0.05 (bfloat16)."""

    prompts_per_step: Positive = 512
    """Groups in the training batch of a step."""

    responses_per_prompt: Positive = 16
    """Size of a group."""

    max_response_tokens: Positive = 20480
    """Generation budget L: longest response, in tokens."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in engine and trainer alike."""

    max_rounds: Positive = 10
    """With dynamic sampling: in how many rounds prompts are drawn for one step. A round draws what the keep rate of the
    steps before says is needed, four batches at most."""

    when_short: Literal["train_partial", "continue", "raise"] = "train_partial"
    """With dynamic sampling, when the batch is not full after them: train on what there is, with a warning; go on
    drawing; or end the run."""

    max_staleness: NotNegative = 0
    """For how many steps after it was drawn a group may still be trained on. 0: only in its own; what is kept beyond
    the batch is thrown away and counted. Otherwise it comes first in the next step's, and all that was drawn is sampled
    to its end, and `algorithm.correction` is on unless you set it."""

    partial: bool = False
    """Answers that are unfinished when the batch is certain pause, and are continued first in the next step, with other
    weights. Needs `max_staleness` of 1 or more; beyond it they are begun anew."""

    max_concurrent: Positive = 512
    """Responses that the embedded engine samples at once."""

    engine_restarts: NotNegative = 3
    """How often one engine that died or hung may be started again in a run; once more, and the run ends. SGLang's."""

    heartbeat_timeout_s: Positive = 120
    """A rank that leads an engine and gives no sign of life for so long while all sample ends the run."""

    answered: ClassVar[frozenset[str]] = frozenset({"top_p", "top_k"})

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, values: Any) -> Any:
        """Drop `top_p` and `top_k` of other programs' recipes where they are off, and refuse them otherwise."""
        if not isinstance(values, dict):
            return values
        for key, off in (("top_p", (1, None)), ("top_k", (-1, 0, None))):
            if values.get(key) not in off:
                raise ValueError(
                    f"{key}={values[key]!r}: training samples from the whole distribution: the trainer's softmax is "
                    "over all tokens, so a truncated one has no log-prob there and importance ratios would be wrong; "
                    "leave it out (evaluation.top_p is for evaluation)"
                )
        return {key: value for key, value in values.items() if key not in cls.answered}
