"""From recipes to a config: inheritance, overrides, refusals of one line, and the texts of the options."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from megatron_rl.config import Config
from megatron_rl.config_docs import describe_options
from megatron_rl.config_files import dump_config, load_config
from megatron_rl.errors import UserError
from megatron_rl.presets import PRESETS
from tests.cases.recipes import REQUIRED, recipe
from tests.tiny import run_config

ROOT = Path(__file__).parents[2]


def refusal(path: Path, *overrides: str) -> str:
    """The one line with which the recipe is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_later_ones_win_from_preset_to_base_to_recipe_to_override(tmp_path: Path) -> None:
    recipe(
        tmp_path,
        "algorithm: {preset: grpo, std_eps: 0.1, std_ddof: 0, advantage: rloo}\ntrainer: {lr: 0.1, adam_eps: 0.1}\n",
        "base.yaml",
    )
    path = recipe(tmp_path, "defaults: base.yaml\nalgorithm: {std_eps: 0.2, std_ddof: 1}\ntrainer: {lr: 0.2}\n")
    config = load_config(path, ["algorithm.std_eps=0.3", "rollout.prompts_per_step=7"])
    algorithm, trainer = config.algorithm, config.trainer
    assert algorithm.normalisation == "sequence_mean"  # the preset's, named by the base
    assert algorithm.advantage == "rloo"  # the base's, over the preset's
    assert (algorithm.std_ddof, trainer.lr, trainer.adam_eps) == (1, 0.2, 0.1)  # the recipe's over the base's
    assert (algorithm.std_eps, config.rollout.prompts_per_step) == (0.3, 7)  # the overrides'


def test_defaults_are_relative_to_their_own_file_and_chain(tmp_path: Path) -> None:
    recipe(tmp_path, "trainer: {lr: 0.1, adam_beta1: 0.1, adam_beta2: 0.1}", "base.yaml")
    recipe(tmp_path, "defaults: ../base.yaml\ntrainer: {adam_beta1: 0.2, adam_beta2: 0.2}", "deep/middle.yaml")
    path = recipe(tmp_path, "defaults: deep/middle.yaml\ntrainer: {adam_beta2: 0.3}")
    trainer = load_config(path).trainer
    assert (trainer.lr, trainer.adam_beta1, trainer.adam_beta2) == (0.1, 0.2, 0.3)


# ---- refusals


def test_a_circle_of_defaults_is_refused(tmp_path: Path) -> None:
    recipe(tmp_path, "defaults: recipe.yaml", "base.yaml")
    message = refusal(recipe(tmp_path, "defaults: base.yaml"))
    assert "recipe.yaml: its `defaults:` line leads back to itself" in message


def test_a_recipe_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    assert "leads back to itself" in refusal(recipe(tmp_path, "defaults: recipe.yaml"))


@pytest.mark.parametrize("value", ["[a.yaml, b.yaml]", "{a: 1}", "3"])
def test_defaults_is_one_path(value: str, tmp_path: Path) -> None:
    assert "defaults: one path" in refusal(recipe(tmp_path, f"defaults: {value}"))


def test_a_missing_recipe_and_a_missing_base_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: no such recipe"
    assert refusal(recipe(tmp_path, "defaults: gone.yaml")) == f"{tmp_path}/gone.yaml: no such recipe"


@pytest.mark.parametrize(
    "content", [b"a: [1", b"- 1\n- 2\n", b"a: 1\na: 2\n", b"\xff\xfe\x00", b"a: ${nowhere}\n", b"just words"]
)
def test_a_file_that_is_no_recipe_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert refusal(path).startswith(str(path))


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trainer: {learning_rate: 1}", "unknown option trainer.learning_rate"),
        ("trainer: {adam_beta_1: 0.5}", "unknown option trainer.adam_beta_1; did you mean trainer.adam_beta1?"),
        ("rolout: {temperature: 1}", "unknown option rolout; did you mean rollout?"),
        ("rollout: {clip_grad: 1}", "did you mean trainer.clip_grad?"),
        ("algorithm: {soft_overlong: {bufer: 2}}", "did you mean algorithm.soft_overlong.buffer?"),
        ("sed: 1", "unknown option sed; did you mean seed?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(line: str, said: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, line)
    assert refusal(path).startswith(f"{path}: unknown option ")
    assert said in refusal(path)


def test_an_unknown_override_is_refused_too(tmp_path: Path) -> None:
    assert "did you mean rollout.temperature?" in refusal(recipe(tmp_path), "rollout.temprature=1")


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_an_override_that_is_no_assignment_is_refused(override: str, tmp_path: Path) -> None:
    assert "write key.sub=value" in refusal(recipe(tmp_path), override)


@pytest.mark.parametrize(
    "override", ["steps=[1", "steps=${nowhere}", "model=3", "model.path.deeper=3", "algorithm=dapo", "rewards=[3]"]
)
def test_an_override_that_makes_no_sense_is_refused_in_one_line(override: str, tmp_path: Path) -> None:
    assert refusal(recipe(tmp_path), override)


@pytest.mark.parametrize("line", ["rewards: [1, 2]", "algorithm: dapo", "trainer: [1]", "algorithm: {loss_kwargs: 3}"])
def test_a_section_of_another_kind_is_refused_by_name(line: str, tmp_path: Path) -> None:
    assert line.split(":")[0] in refusal(recipe(tmp_path, line))


def test_a_base_and_a_recipe_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    recipe(tmp_path, "trainer: {lr: 0.1}", "base.yaml")
    assert "trainer" in refusal(recipe(tmp_path, "defaults: base.yaml\ntrainer: [1]"))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("steps=soon", "steps"),
        ("steps=0", "steps"),
        ("steps=1.5", "steps"),
        ("seed=-1", "seed"),
        ("rollout.temperature=0", "rollout.temperature"),
        ("rollout.temperature=-1", "rollout.temperature"),
        ("rollout.temperature=.nan", "rollout.temperature"),
        ("trainer.lr=-1", "trainer.lr"),
        ("trainer.lr=.inf", "trainer.lr"),
        ("trainer.adam_beta1=1", "trainer.adam_beta1"),
        ("trainer.adam_eps=0", "trainer.adam_eps"),
        ("trainer.dtype=float16", "trainer.dtype"),
        ("trainer.tensor_parallel_size=0", "trainer.tensor_parallel_size"),
        ("algorithm.std_ddof=2", "algorithm.std_ddof"),
        ("algorithm.kl.coef=-1", "algorithm.kl.coef"),
        ("algorithm.kl.estimator=k4", "algorithm.kl.estimator"),
        ("algorithm.kl.place=both", "algorithm.kl.place"),
        ("algorithm.correction.level=group", "algorithm.correction.level"),
        ("algorithm.correction.mode=clip", "algorithm.correction.mode"),
        ("algorithm.correction.cap=0.9", "algorithm.correction.cap"),
        ("algorithm.correction.floor=1.1", "algorithm.correction.floor"),
        ("algorithm.preset=ppo", "algorithm.preset"),
        ("data.overlong_prompts=cut", "data.overlong_prompts"),
        ("checkpoint.every=0", "checkpoint.every"),
        ("rewards.marker=''", "rewards.marker"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(override: str, key: str, tmp_path: Path) -> None:
    path = recipe(tmp_path)
    assert refusal(path, override).startswith(f"{path}: {key}: ")


@pytest.mark.parametrize("missing", ["run_dir", "steps", "model.path", "data.train"])
def test_what_is_required_is_asked_for(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    lines = [line for line in REQUIRED.splitlines() if not line.startswith(missing.split(".")[0])]
    path.write_text("\n".join([*lines, f"{missing.split('.')[0]}: {{}}" if "." in missing else ""]))
    assert f"{missing} is required" in refusal(path)


def test_an_empty_recipe_lacks_what_is_required(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("")
    assert "run_dir is required" in refusal(path)
    assert "3 more" in refusal(path)


SEEDED = ["rollout.engine=sglang", "rollout.deterministic=true"]


@pytest.mark.parametrize(
    ("overrides", "corrected"),
    [
        ([], False),
        (["rollout.async_steps=1"], True),
        (["rollout.async_steps=1", "algorithm.correction.cap=3"], True),
        (["rollout.async_steps=1", "algorithm.correction=null"], False),
        (["rollout.async_steps=1", "algorithm.old_logprobs=rollout"], False),
        (["rollout.max_staleness=1", "rollout.partial=true"], True),
        (["rollout.max_staleness=1", "algorithm.correction=null"], False),
    ],
)
def test_what_older_weights_sampled_is_corrected_unless_you_say_otherwise(
    overrides: list[str], corrected: bool, tmp_path: Path
) -> None:
    separate = ["rollout.placement=separate", "rollout.ranks=1"]
    correction = load_config(recipe(tmp_path), [*separate, *overrides]).algorithm.correction
    assert (correction is not None) == corrected
    assert correction is None or correction.cap == (3 if "cap=3" in str(overrides) else 2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.sequence_parallel=true"], "needs trainer.tensor_parallel_size > 1"),
        (["rollout.tensor_parallel_size=2"], "the embedded engine runs on one rank"),
        (["rollout.max_response_tokens=4095"], "algorithm.soft_overlong.buffer (4096) is longer than"),
        (["rewards.right=-1"], "rewards.wrong (-1.0) must be below rewards.right (-1.0)"),
        (["rewards.wrong=2"], "rewards.wrong (2.0) must be below rewards.right (1.0)"),
        (["rollout.responses_per_prompt=1"], "a group of one has no advantage"),
        (["rollout.prompts_per_step=3", "algorithm.updates_per_rollout=4"], "needs at least as many groups"),
        (["algorithm.correction.cap=3", "algorithm.old_logprobs=rollout"], "algorithm.correction: with algorithm.old_"),
        (["rollout.partial=true"], "rollout.partial: what is continued in the next step is one step old there"),
        (["rollout.placement=separate"], "rollout.ranks: set it with rollout.placement=separate, and only then"),
        (["rollout.ranks=1"], "rollout.ranks: set it with rollout.placement=separate, and only then"),
        (["rollout.async_steps=1"], "rollout.async_steps: to sample while the trainer works needs"),
        (["trainer.lr_warmup_steps=4", "trainer.lr_warmup_rollout_steps=2"], "set one of the two"),
        (
            [*SEEDED, "rollout.sglang.extra_args=[--attention-backend,torch_native]"],
            "rollout.deterministic: SGLang's attention backend torch_native (rollout.sglang.extra_args) has no",
        ),
        ([*SEEDED, "rollout.sglang.extra_args=[--attention-backend=flashmla]"], "attention backend flashmla"),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    assert said in refusal(recipe(tmp_path), *overrides)


OWN = ", or package.module:function"


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("advantage", f"grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, opo{OWN}"),
        ("normalisation", f"sequence_mean, token_mean_group, token_mean_batch, constant{OWN}"),
        ("loss", f"ppo_clip, gspo, cispo, reinforce{OWN}"),
        ("group_filter", f"mixed{OWN}"),
        ("preset", ", ".join(PRESETS)),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(option: str, known: str, tmp_path: Path) -> None:
    path = recipe(tmp_path)
    said = refusal(path, f"algorithm.{option}=grppo")
    assert said == f"{path}: algorithm.{option}: 'grppo' is not one of {known}"


def test_a_function_of_ones_own_may_be_named_but_is_no_preset(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    options = ("advantage", "normalisation", "loss", "group_filter")
    algorithm = load_config(path, [f"algorithm.{option}=my.module:own" for option in options]).algorithm
    assert [getattr(algorithm, option) for option in options] == ["my.module:own"] * 4
    assert "is not one of grpo, dapo" in refusal(path, "algorithm.preset=my.module:own")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.correction.cap=3", "algorithm.old_logprobs=trainer"],
        ["algorithm.old_logprobs=rollout"],
        ["trainer.lr_warmup_steps=4"],
        ["trainer.lr_warmup_rollout_steps=2"],
        SEEDED,
        [*SEEDED, "rollout.sglang.extra_args=[--attention-backend,triton]"],
        ["rollout.deterministic=true", "rollout.sglang.extra_args=[--attention-backend,torch_native]"],
    ],
)
def test_one_of_two_that_exclude_each_other_is_taken(overrides: list[str], tmp_path: Path) -> None:
    load_config(recipe(tmp_path), overrides)


def test_the_nearest_combinations_that_can_work_are_taken(tmp_path: Path) -> None:
    config = load_config(
        recipe(tmp_path),
        [
            "trainer.sequence_parallel=true",
            "trainer.tensor_parallel_size=2",
            "rollout.max_response_tokens=4096",
            "rollout.responses_per_prompt=2",
            "rollout.prompts_per_step=3",
            "algorithm.updates_per_rollout=3",
        ],
    )
    assert config.trainer.sequence_parallel


# ---- the resolved config


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize(
    "text",
    [
        "",
        "seed: 7\nrewards: {marker: '####', right: 2}\ntrainer: {lr: 1e-7, sequence_parallel: true, "
        "tensor_parallel_size: 2}\nevaluation: {every: 3}\nrollout: {temperature: 0.7, max_rounds: 3}\n",
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.soft_overlong=null", "algorithm.dynamic_sampling=false", "rewards.wrong=-0.5"],
        ["algorithm.loss=my.module:loss"],
        ["algorithm.loss=my.module:loss", "algorithm.loss_kwargs.beta=0.1", "algorithm.loss_kwargs.other=null"],
        ["algorithm.loss_kwargs.dual_clip=3"],
    ],
)
def test_the_dumped_config_loads_back_to_the_same(preset: str, text: str, overrides: list[str], tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path, text), [f"algorithm.preset={preset}", *overrides])
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


def test_a_config_is_frozen() -> None:
    config = run_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.lr = 3.0


def sections(model: type[BaseModel] = Config) -> list[type[BaseModel]]:
    found = [model]
    for option in model.model_fields.values():
        candidates = [option.annotation, *getattr(option.annotation, "__args__", ())]
        found += [s for c in candidates if isinstance(c, type) and issubclass(c, BaseModel) for s in sections(c)]
    return found


def test_every_option_and_every_section_has_a_text() -> None:
    assert len(sections()) == 18
    for section in sections():
        assert (section.__doc__ or "").strip(), section
        for key, option in section.model_fields.items():
            is_section = isinstance(option.annotation, type) and issubclass(option.annotation, BaseModel)
            assert is_section or (option.description or "").strip().endswith("."), f"{section.__name__}.{key}"


def test_the_table_of_options_has_a_row_for_each_with_its_default_and_text() -> None:
    table = describe_options()
    assert "| `rollout.temperature` | number | `1.0` | Divides the logits, in engine and trainer alike. |" in table
    assert "| `steps` | integer | required | Rollout steps. |" in table
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(
        not (isinstance(option.annotation, type) and issubclass(option.annotation, BaseModel))
        for section in sections()
        for option in section.model_fields.values()
    )
    for row in rows:
        kind = row.replace("||", "| |").split(" | ")[1]
        assert kind.count("[") == kind.count("]"), row
        assert "megatron_rl." not in kind, row


def test_the_page_of_options_is_up_to_date() -> None:
    page = ROOT / "docs" / "config.md"
    assert page.exists(), "run `make docs`"
    assert page.read_text() == describe_options(), "run `make docs`"


RECIPES = sorted((ROOT / "launch" / "recipes").glob("**/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_recipes_that_are_shipped_load(path: Path) -> None:
    load_config(path)


def test_the_demo_recipe_is_dapo_with_sixteen_responses() -> None:
    config = load_config(ROOT / "launch" / "recipes" / "demo_arithmetic.yaml")
    assert (config.algorithm.preset, config.rollout.responses_per_prompt) == ("dapo", 16)
    assert config.algorithm.dynamic_sampling


# ---- sampling


@pytest.mark.parametrize("key", ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.top_k=1", "rollout.top_p=0"])
def test_truncated_sampling_in_training_is_refused_with_the_reason(tmp_path: Path, key: str) -> None:
    message = refusal(recipe(tmp_path, ""), key)
    assert message.endswith("evaluation.top_p is for evaluation)")
    assert f"rollout: {key.removeprefix('rollout.')}: training samples from the whole distribution" in message


@pytest.mark.parametrize("key", ["top_p=1.0", "top_p=1", "top_k=-1", "top_k=0", "top_k=null"])
def test_truncation_that_is_off_is_dropped(tmp_path: Path, key: str) -> None:
    assert load_config(recipe(tmp_path, ""), [f"rollout.{key}"]) == load_config(recipe(tmp_path, ""))


def test_greedy_evaluation_is_one_sample_of_the_likeliest(tmp_path: Path) -> None:
    path = recipe(tmp_path, "evaluation: {greedy: true, samples_per_prompt: 1}")
    assert load_config(path).evaluation.greedy
    assert "all 16 samples of a prompt would be the same" in refusal(recipe(tmp_path, "evaluation: {greedy: true}"))
    for other in ("temperature=0.5", "top_p=0.9"):
        message = refusal(recipe(tmp_path, "evaluation: {greedy: true, samples_per_prompt: 1}"), f"evaluation.{other}")
        assert "greedy takes the likeliest token whatever" in message


@pytest.mark.parametrize("value", ["0", "1.1", "-0.5"])
def test_top_p_is_a_share(tmp_path: Path, value: str) -> None:
    assert "evaluation.top_p" in refusal(recipe(tmp_path, ""), f"evaluation.top_p={value}")
