"""Options of the SGLang servers: typed, frozen, documented by the text under each."""

import ipaddress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from megatron_rl.section import Positive, Seconds, Section

OURS = (
    "--model-path --host --port --tp-size --tensor-parallel-size --tp --mem-fraction-static --weight-version "
    "--api-key --admin-api-key --config --dtype --load-format --skip-tokenizer-init --enable-memory-saver "
    "--enable-deterministic-inference --random-seed --enable-weights-cpu-backup"
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
    """How long one prompt's responses may take together, time in the server's queue included."""

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
