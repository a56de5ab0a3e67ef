"""What works and is probably not meant is said."""

from pathlib import Path

import pytest

from megatron_rl.config_files import load_config
from megatron_rl.doubts import doubts
from tests.cases.recipes import recipe

LEARNED, NO_HOLD = "rests on rule-based rewards", "the gradient of k1 in the loss is 0 on average"

OLD = "tokens that older weights sampled are trained on as if the current ones had"
SCALED = "it is scaled up to full size"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["rewards.learned=true"], [LEARNED]),
        (["rewards.learned=true", "algorithm.kl.coef=0.1"], []),
        (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1"], [NO_HOLD]),
        (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1", "rewards.learned=true"], [NO_HOLD]),
        (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1", "algorithm.kl.place=reward"], [SCALED]),
        (["algorithm.kl.coef=0.1", "algorithm.kl.place=reward", "algorithm.advantage=dr_grpo"], []),
        (["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k2"], []),
        (["algorithm.kl.coef=0", "algorithm.kl.estimator=k1"], []),
        (["rollout.max_staleness=1"], []),
        (["rollout.max_staleness=1", "algorithm.correction=null"], [OLD]),
        (["rollout.max_staleness=1", "algorithm.old_logprobs=rollout"], []),
    ],
)
def test_what_is_probably_not_meant_is_doubted(overrides: list[str], said: list[str], tmp_path: Path) -> None:
    found = doubts(load_config(recipe(tmp_path), overrides))
    assert len(found) == len(said)
    for doubt, part in zip(found, said, strict=True):
        assert part in doubt
        assert doubt.startswith(("algorithm.kl", "rollout.max_staleness"))
