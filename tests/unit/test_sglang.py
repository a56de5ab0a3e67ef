"""What the SGLang engine refuses before it starts a server; what it does is in tests/engines."""

from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.training import cpu
from megatron_rl.training.hf_config import read_model_spec
from tests.tiny import run_config


@pytest.mark.parametrize("deterministic", [True, False])
def test_seeds_can_not_count_on_a_cpu(
    deterministic: bool, untied_model: tuple[Path, Qwen2ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_cuda", lambda: False)
    config = run_config(rollout={"engine": "sglang", "deterministic": deterministic})
    spec, group = read_model_spec(untied_model[0]), EngineGroup(rank=0, size=1, world=1)

    def engine() -> SglangEngine:
        return SglangEngine(config, spec, group, eos_token_ids=frozenset({2}), vocabulary=23)

    if deterministic:
        with pytest.raises(UserError, match="SGLang on a CPU has no deterministic attention; set it to false"):
            engine()
    else:
        engine()
