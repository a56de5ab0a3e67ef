"""Presets: the switches of their papers, and what of them a recipe may change."""

from pathlib import Path

import pytest
import torch

from megatron_rl.config_files import dump_config, load_config
from megatron_rl.presets import PRESETS
from megatron_rl.training.objective import Objective, load_loss
from tests.cases.recipes import recipe

NARROW, WIDE = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
GRPO, SOFT = ("grpo", "sequence_mean"), 4096
# Advantage and normalisation; loss and its clip; buffer of the soft punishment; truncated answers masked; dynamic
# sampling; reward of a wrong answer.
OF_PAPERS: dict[str, tuple[object, ...]] = {
    "grpo": (GRPO, "ppo_clip", NARROW, None, False, False, 0.0),
    "dapo": (("grpo", "token_mean_group"), "ppo_clip", WIDE, SOFT, False, True, -1.0),
    "dapo_batch": (("grpo", "token_mean_batch"), "ppo_clip", WIDE, SOFT, False, True, -1.0),
    "dr_grpo": (("dr_grpo", "constant"), "ppo_clip", NARROW, None, False, False, 0.0),
    "rloo": (("rloo", "constant"), "ppo_clip", NARROW, None, False, False, 0.0),
    "gspo": (GRPO, "gspo", {"clip_low": 0.0003, "clip_high": 0.0004}, None, False, False, 0.0),
    "cispo": (("grpo", "token_mean_group"), "cispo", {"clip_low": None, "clip_high": 4.0}, None, False, True, 0.0),
    # Yu et al. (2025), table 1: GRPO, + overlong filtering, + clip-higher, + soft punishment, + token-level loss,
    # + dynamic sampling.
    "dapo_ladder_1": (GRPO, "ppo_clip", NARROW, None, False, False, -1.0),
    "dapo_ladder_2": (GRPO, "ppo_clip", NARROW, None, True, False, -1.0),
    "dapo_ladder_3": (GRPO, "ppo_clip", WIDE, None, True, False, -1.0),
    "dapo_ladder_4": (GRPO, "ppo_clip", WIDE, SOFT, False, False, -1.0),
    "dapo_ladder_5": (("grpo", "token_mean_group"), "ppo_clip", WIDE, SOFT, False, False, -1.0),
    "dapo_ladder_6": (("grpo", "token_mean_group"), "ppo_clip", WIDE, SOFT, False, True, -1.0),
}


@pytest.mark.parametrize("preset", OF_PAPERS)
def test_a_preset_sets_the_switches_of_its_paper(preset: str, tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path, f"algorithm: {{preset: {preset}}}"))
    algorithm = config.algorithm
    assert OF_PAPERS[preset] == (
        (algorithm.advantage, algorithm.normalisation),
        algorithm.loss,
        algorithm.loss_kwargs,
        algorithm.soft_overlong.buffer if algorithm.soft_overlong else None,
        algorithm.mask_truncated,
        algorithm.dynamic_sampling,
        config.rewards.wrong,
    )
    # What they all leave as it is: no KL, no entropy bonus, no correction, old log-probs by the trainer.
    rest = (algorithm.kl.coef, algorithm.entropy_coef, algorithm.correction, algorithm.old_logprobs)
    assert rest == (0.0, 0.0, None, "trainer")
    assert (algorithm.preset, algorithm.group_filter, algorithm.updates_per_rollout) == (preset, "mixed", 1)
    assert (algorithm.std_ddof, algorithm.std_eps, config.rewards.right) == (1, 1e-6, 1.0)
    if algorithm.soft_overlong:
        assert algorithm.soft_overlong.floor == -1.0


def test_every_preset_can_be_named() -> None:
    assert set(PRESETS) == set(OF_PAPERS)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_loss_of_a_preset_can_be_loaded_and_tried(preset: str, tmp_path: Path) -> None:
    algorithm = load_config(recipe(tmp_path, f"algorithm: {{preset: {preset}}}")).algorithm
    Objective(loss=load_loss(algorithm), algorithm=algorithm).try_out(torch.device("cpu"))


def test_the_last_rung_of_the_ladder_is_dapo(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    ladder, dapo = (load_config(path, [f"algorithm.preset={name}"]) for name in ("dapo_ladder_6", "dapo"))
    algorithm = ladder.algorithm.model_copy(update={"preset": "dapo"})
    assert ladder.model_copy(update={"algorithm": algorithm}) == dapo


def test_dapo_is_the_preset_of_a_recipe_that_names_none(tmp_path: Path) -> None:
    assert load_config(recipe(tmp_path)).algorithm.normalisation == "token_mean_group"


def test_an_override_can_change_the_preset_of_the_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, "algorithm: {preset: dapo, std_eps: 0.5}")
    config = load_config(path, ["algorithm.preset=dr_grpo"])
    assert (config.algorithm.normalisation, config.rewards.wrong) == ("constant", 0.0)
    assert config.algorithm.std_eps == 0.5


def test_one_keyword_of_the_presets_loss_may_be_changed_alone(tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path), ["algorithm.loss_kwargs.dual_clip=10"])
    assert config.algorithm.loss_kwargs == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("3.0", 3.0), ("1e-3", 1e-3), ("true", True), ("false", False), ("soft", "soft"), ("null", None)],
)
def test_a_keyword_of_a_loss_keeps_its_type(text: str, value: object, tmp_path: Path) -> None:
    of_override = load_config(recipe(tmp_path), [f"algorithm.loss_kwargs.own={text}"])
    of_recipe = load_config(recipe(tmp_path, f"algorithm: {{loss_kwargs: {{own: {text}}}}}"))
    for config in (of_override, of_recipe):
        own = config.algorithm.loss_kwargs["own"]
        assert (own, type(own)) == (value, type(value))
    (tmp_path / "config.yaml").write_text(dump_config(of_recipe))
    again = load_config(tmp_path / "config.yaml").algorithm.loss_kwargs["own"]
    assert (again, type(again)) == (value, type(value))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_another_loss_does_not_get_the_keywords_of_the_presets_loss(preset: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, f"algorithm: {{preset: {preset}, loss: 'my.module:loss'}}")
    assert load_config(path).algorithm.loss_kwargs == {}
    assert load_config(path, ["algorithm.loss_kwargs.beta=2"]).algorithm.loss_kwargs == {"beta": 2.0}


def test_null_switches_off_what_the_preset_switches_on(tmp_path: Path) -> None:
    assert load_config(recipe(tmp_path), ["algorithm.soft_overlong=null"]).algorithm.soft_overlong is None
