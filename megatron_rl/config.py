"""Every option: typed, frozen, documented by the text under it. `train --help` and docs/config.md read these texts."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_rl.algorithms.advantages import ESTIMATORS
from megatron_rl.algorithms.corrections import Level, Mode
from megatron_rl.algorithms.kl import KlEstimator
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.weights import NORMALISATIONS
from megatron_rl.presets import PRESETS
from megatron_rl.resharding.options import ReshardConfig
from megatron_rl.rollout.options import DETERMINISTIC_BACKENDS, RolloutConfig
from megatron_rl.section import Duration, NotNegative, Positive, Seconds, Section, Seed
from megatron_rl.training.options import TrainerConfig


class ModelConfig(Section):
    """The model that is trained."""

    path: Path
    """Hugging Face directory: config.json, *.safetensors, tokenizer.json. The architecture is read from it."""


class DataConfig(Section):
    """Prompts."""

    train: Path
    """JSONL file, one object a line: `prompt` (a string, or a list of chat messages), `answer`, any other keys."""

    eval: Path | None = None
    """JSONL file of held-out prompts; none: no evaluation."""

    chat_template: bool = False
    """Render prompts with the tokenizer's chat template; otherwise the text is tokenised as it stands."""

    max_prompt_tokens: Positive = 2048
    """Longest prompt, in tokens."""

    overlong_prompts: Literal["skip", "refuse"] = "skip"
    """What happens to longer ones: skipped and counted, or the run is refused with their line numbers."""


class RewardConfig(Section):
    """How answers are graded. A grader says how right an answer is, from 0 (wrong) to 1 (right)."""

    grader: str = "after_marker"
    """`after_marker`: what follows the only `marker` of a finished response equals `answer`; `math`: the last
    `\\boxed{}` means the same as `answer` (math-verify); `http://...` or `https://...`: a server is asked; or
    `package.module:function`, called as `function(prompt, text, finished)` (docs/graders.md)."""

    graders: dict[str, str] = Field(default={})
    """Graders of rows by their `data_source`: a mapping from it to a name as `grader` has it. All other rows are
    `grader`'s."""

    marker: Annotated[str, Field(min_length=1)] = "#"
    """For `after_marker`: for example `####` (GSM8K) or `Answer:` (DAPO)."""

    timeout_s: Seconds = 30
    """How long a grader may take for one answer, or for a group if it takes groups. Then its process is killed and
    replaced, and the answer is ungraded."""

    workers: Positive = 4
    """Processes that run graders, for each engine."""

    max_ungraded: Annotated[float, Field(ge=0, le=1)] = 0.2
    """A step with a larger share of ungraded responses ends the run."""

    wrong: float = 0.0
    """Reward of a wrong answer. The DAPO preset sets −1."""

    right: float = 1.0
    """Reward of a right answer."""

    learned: bool = False
    """The grader is a learned or a remote model rather than a rule. It decides nothing; it warns of training without
    KL, which rests on rule-based rewards."""


class SoftOverlongConfig(Section):
    """Soft overlong punishment (DAPO, eq. 13)."""

    buffer: Positive = 4096
    """Last tokens of `rollout.max_response_tokens` over which the penalty grows from 0 to −1."""

    floor: Annotated[float, Field(lt=0)] | None = -1.0
    """The penalty is never below it; `null` as some code has it."""


class KlConfig(Section):
    """Divergence from a reference policy: the weights of `model.path`, kept in host memory."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """How much of it is added to the loss, or taken from the reward; 0: off, and no reference policy is kept."""

    estimator: KlEstimator = "k3"
    """`k1` d, `k2` d²/2, `k3` exp(−d) − 1 + d, with d = log π − log π_ref of a sampled token."""

    place: Literal["loss", "reward", "measure"] = "loss"
    """`loss`: added to each token's loss, with gradient; `reward`: its sum over a response is taken from the
    response's reward, before advantages; `measure`: added nowhere (whatever `coef` says), for a loss of your own."""

    @property
    def wanted(self) -> bool:
        """Whether a reference policy is kept."""
        return self.coef > 0 or self.place == "measure"


class CorrectionConfig(Section):
    """Importance weights between the engine, which sampled, and the trainer (megatron_rl/algorithms/corrections.py)."""

    level: Level = "token"
    """`token`: by each token's own ratio; `sequence`: by the product over its response."""

    mode: Mode = "truncate"
    """`truncate`: the ratio, at most `cap`; `mask`: nothing where it is above `cap` or below `floor`."""

    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest ratio that counts in full."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest ratio that counts; for `mask`."""


class AlgorithmConfig(Section):
    """The objective. A preset sets values of these switches and nothing else; what you set yourself wins."""

    preset: str = "dapo"
    """`grpo` (Shao et al., 2024), `dapo` (Yu et al., 2025), `dapo_batch` (DAPO as most code has it), `dr_grpo` (Liu et
    al., 2025), `rloo` (Ahmadian et al., 2024), `gspo` (Zheng et al., 2025), `cispo` (MiniMax, 2025), or the rungs of
    DAPO's ablation, `dapo_ladder_1` to `dapo_ladder_6`."""

    advantage: str = "grpo"
    """`grpo` (r − mean)/std, `dr_grpo` r − mean, `rloo` r − mean of the others in the group,
    `reinforce_plus_plus_baseline` (r − mean)/std with the deviation of r − mean over the batch, `opo` r − mean weighted
    by length; or `package.module:function`, called as `function(rewards, group_ids, lengths)`."""

    std_ddof: Literal[0, 1] = 1
    """1: the variance is divided by n − 1 (verl, TRL, OpenRLHF); 0: by n (Megatron-LM)."""

    std_eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    normalisation: str = "sequence_mean"
    """Weight of a token: `sequence_mean` 1/(N len), `token_mean_group` 1/(Q · tokens of its group),
    `token_mean_batch` 1/tokens, `constant` 1/(N · rollout.max_response_tokens); or `package.module:function`, called as
    `function(lengths, group_ids, budget)`."""

    loss: str = "ppo_clip"
    """Per-token loss: `ppo_clip`, `gspo`, `cispo`, `reinforce`, or `package.module:function` (`LossInputs` to
    `LossOutput`, see docs/custom_loss.md)."""

    loss_kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the loss: clip_low and clip_high (`ppo_clip`, `gspo`, `cispo`), dual_clip (`ppo_clip`)."""

    kl: KlConfig = KlConfig()
    entropy_coef: float = 0.0
    """Entropy bonus: how much of each token's entropy, in nats, is taken from its loss."""

    entropy_gradient: bool = False
    """`LossInputs.entropies` carry a gradient, for a loss of your own that wants one. Takes some memory and time."""

    correction: CorrectionConfig | None = None
    """Weigh policy losses by trainer over engine probability; `null`: off. How far the two are apart is always measured
    (`mismatch/...`)."""

    dynamic_sampling: bool = False
    """Train only on groups that `group_filter` keeps, and draw prompts until the batch is full."""

    group_filter: str = "mixed"
    """`mixed`: 0 < correct < G, by scores before shaping; or `package.module:function`, called with the scores of a
    group's graded responses."""

    soft_overlong: SoftOverlongConfig | None = None
    """Penalise the last tokens before the budget; `null`: off."""

    mask_truncated: bool = False
    """Responses that were cut off at the budget keep their part in the group's statistics and are not trained on."""

    updates_per_rollout: Positive = 1
    """Optimizer steps per rollout step; the batch is cut at group boundaries."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer before the first update, or as the engine reported them."""


class EvaluationConfig(Section):
    """Held-out accuracy: avg@k on `data.eval`, before the first step, every so often, and after the last."""

    every: Positive | None = None
    """Rollout steps between evaluations; `null`: only before and after."""

    samples_per_prompt: Positive = 16
    """k of avg@k."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: from the smallest set of most likely tokens that have at least this probability together."""

    greedy: bool = False
    """Take the most likely token instead of drawing. Needs `samples_per_prompt=1`."""

    @model_validator(mode="after")
    def _greedy_alone(self) -> "EvaluationConfig":
        """Refuse what means nothing to greedy sampling."""
        if self.greedy and self.samples_per_prompt > 1:
            raise ValueError(
                f"greedy: all {self.samples_per_prompt} samples of a prompt would be the same; set samples_per_prompt "
                "to 1"
            )
        if self.greedy and (self.temperature != 1 or self.top_p < 1):
            raise ValueError("greedy takes the likeliest token whatever temperature and top_p are; leave these out")
        return self


class CheckpointConfig(Section):
    """What a run leaves to be resumed from."""

    every: Positive | None = 20
    """Rollout steps between checkpoints; one is always written at the end and when the run is asked to stop."""

    keep: Positive = 2
    """How many of the newest stay. An older one goes only when the new one is complete."""

    keep_every: Positive | None = None
    """Those of every so many steps stay too, beside the newest."""

    keep_best: str | None = None
    """The one with the best value of this metric stays too, such as `eval/accuracy`, of those after whose step it was
    measured; of equal ones the newer."""

    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of `keep_best` is the best."""

    export_hf: bool = True
    """Write the trained model as a Hugging Face directory at the end."""


class StopConfig(Section):
    """When a run stops by itself, saved, to be started again: exit code 75."""

    after: Duration | None = None
    """Time since the process began, such as 3h50m, 45m or a number of seconds. The run stops before a step that, with
    its save, would end later: as long as the longest of the last ten steps, and as the last save."""


class TelemetryConfig(Section):
    """Where figures go, beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""

    samples_per_step: NotNegative = 16
    """Groups of each step that are saved with their texts under `samples/`."""

    keep_batches: NotNegative = 2
    """Training batches of the newest steps that are kept under `batches/`, for `megatron-rl replay`; 0: none. About 12
    bytes a token, written before the step is trained on."""


class Config(Section):
    """A run."""

    run_dir: Path
    """Everything the run leaves is written here. A directory with checkpoints of the same run is resumed."""

    seed: Seed = 0
    """Seeds the order of prompts and every sampled response."""

    steps: Positive
    """Rollout steps."""

    collective_timeout_s: Seconds = 1800
    """How long a rank waits for the others before the run is given up."""

    model: ModelConfig
    data: DataConfig
    rewards: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    reshard: ReshardConfig = ReshardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="before")
    @classmethod
    def _correction_where_off_policy(cls, values: Any) -> Any:
        """Weigh what older weights sampled, unless the user says how."""
        if isinstance(values, dict) and isinstance(rollout := values.get("rollout"), dict):
            algorithm = values.get("algorithm") or {}
            rollout_logprobs = isinstance(algorithm, dict) and algorithm.get("old_logprobs") == "rollout"
            off_policy = rollout.get("async_steps") == 1 or rollout.get("max_staleness")
            if off_policy and isinstance(algorithm, dict) and not rollout_logprobs:
                return {**values, "algorithm": {"correction": {}, **algorithm}}
        return values

    @model_validator(mode="after")
    def _combinations(self) -> "Config":
        """Refuse combinations that can't work, with what to do instead."""
        trainer, rollout, algorithm = self.trainer, self.rollout, self.algorithm
        if trainer.sequence_parallel and trainer.tensor_parallel_size == 1:
            raise ValueError("trainer.sequence_parallel needs trainer.tensor_parallel_size > 1; set it to false")
        if trainer.max_tokens_per_micro_batch is None and trainer.micro_batch_size is None:
            raise ValueError("trainer.max_tokens_per_micro_batch and trainer.micro_batch_size: set one of them")
        if trainer.pipeline_chunks > 1 and trainer.pipeline_parallel_size == 1:
            raise ValueError("trainer.pipeline_chunks needs trainer.pipeline_parallel_size > 1; set it to 1")
        if trainer.memory.optimizer_on_host and not (trainer.dtype == "bfloat16" and trainer.distributed_optimizer):
            raise ValueError(
                "trainer.memory.optimizer_on_host needs trainer.dtype=bfloat16 and trainer.distributed_optimizer=true"
            )
        if rollout.engine == "embedded" and rollout.tensor_parallel_size != 1:
            raise ValueError("rollout.tensor_parallel_size: the embedded engine runs on one rank; set it to 1")
        if rollout.engine == "sglang" and rollout.deterministic:
            backend = rollout.sglang.attention_backend
            if backend is not None and backend not in DETERMINISTIC_BACKENDS:
                raise ValueError(
                    f"rollout.deterministic: SGLang's attention backend {backend} (rollout.sglang.extra_args) has no "
                    f"deterministic inference; take one of {', '.join(DETERMINISTIC_BACKENDS)}, or leave it to SGLang"
                )
        if algorithm.soft_overlong and algorithm.soft_overlong.buffer > rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.soft_overlong.buffer ({algorithm.soft_overlong.buffer}) is longer than "
                f"rollout.max_response_tokens ({rollout.max_response_tokens}); lower it or set soft_overlong to null"
            )
        if (rollout.placement == "separate") != (rollout.ranks > 0):
            raise ValueError("rollout.ranks: set it with rollout.placement=separate, and only then")
        if rollout.async_steps and rollout.placement != "separate":
            raise ValueError("rollout.async_steps: to sample while the trainer works needs rollout.placement=separate")
        if rollout.partial and not rollout.max_staleness:
            raise ValueError(
                "rollout.partial: what is continued in the next step is one step old there; set rollout.max_staleness "
                "to 1 or more"
            )
        if self.rewards.wrong >= self.rewards.right:
            raise ValueError(f"rewards.wrong ({self.rewards.wrong}) must be below rewards.right ({self.rewards.right})")
        _check_names(algorithm)
        if algorithm.correction and algorithm.old_logprobs == "rollout":
            raise ValueError(
                "algorithm.correction: with algorithm.old_logprobs=rollout the ratio has the engine's log-probs in it "
                "already; set one of the two back"
            )
        if algorithm.correction and algorithm.correction.floor and algorithm.correction.mode == "truncate":
            raise ValueError("algorithm.correction.floor is for mode=mask; truncation has a cap only")
        if trainer.lr_warmup_steps and trainer.lr_warmup_rollout_steps:
            raise ValueError("trainer.lr_warmup_steps and trainer.lr_warmup_rollout_steps: set one of the two")
        if rollout.responses_per_prompt == 1:
            raise ValueError(
                "rollout.responses_per_prompt: a group of one has no advantage (it is its own mean); set 2 or more"
            )
        if rollout.prompts_per_step < algorithm.updates_per_rollout:
            raise ValueError(
                f"algorithm.updates_per_rollout ({algorithm.updates_per_rollout}) needs at least as many groups: "
                f"rollout.prompts_per_step is {rollout.prompts_per_step}"
            )
        return self


def _check_names(algorithm: AlgorithmConfig) -> None:
    """Refuse a name that is in no registry and isn't package.module:function."""
    for option, known in (
        ("preset", tuple(PRESETS)),
        ("advantage", ESTIMATORS),
        ("normalisation", NORMALISATIONS),
        ("loss", tuple(LOSSES)),
        ("group_filter", ("mixed",)),
    ):
        name = getattr(algorithm, option)
        if name not in known and (":" not in name or option == "preset"):
            own = "" if option == "preset" else ", or package.module:function"
            raise ValueError(f"algorithm.{option}: {name!r} is not one of {', '.join(known)}{own}")
