"""check-loss: every check catches a loss that is wrong in its way, and only then; right losses pass."""

import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl import cli
from megatron_rl.algorithms.kl import kl_estimates
from megatron_rl.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossOutput,
    cispo,
    gspo,
    masked_mean,
    ppo_clip,
    reinforce,
)
from megatron_rl.check_loss import CHECKS, EXAMPLES, PRECONDITIONS, check_loss

Loss = Callable[[LossInputs], LossOutput]
SHAPES, DEPENDS, PURE, TAKEN = list(CHECKS)[:PRECONDITIONS]
FINITE, MASK, SLOPES, SPLIT, CONTEXT, ORDER, METRICS, REFERENCE = list(CHECKS)[PRECONDITIONS:]


def verdicts(loss: Loss) -> dict[str, str]:
    """By check: what is not ok, as it is printed."""
    return {finding.check: str(finding) for finding in check_loss(loss) if finding.verdict != "ok"}


def failure(loss: Loss, check: str) -> str:
    """How the check failed."""
    found = verdicts(loss).get(check, "nothing")
    assert found.startswith(f"FAIL {check}: "), verdicts(loss)
    return found


def output(inputs: LossInputs, change: Any) -> LossOutput:
    """REINFORCE's losses, changed."""
    return LossOutput(losses=change(reinforce(inputs).losses))


# ---- right ones


@pytest.mark.parametrize("loss", [ppo_clip, gspo, reinforce, partial(ppo_clip, clip_low=0.0, dual_clip=3.0)])
def test_a_loss_whose_gradient_is_its_derivative_passes_without_a_note(loss: Loss) -> None:
    assert [finding.check for finding in check_loss(loss)] == list(CHECKS)
    assert verdicts(loss) == {}


def test_a_stop_gradient_is_noted_with_token_and_values() -> None:
    found = verdicts(cispo)
    assert list(found) == [SLOPES]
    assert found[SLOPES].startswith(f"note {SLOPES}: the gradient is not the derivative of the value: fine if a stop-g")
    # The first response is of one token, of advantage 1.5 and weight 1/9.
    assert 'input "on-policy" at token 0 of response 0' in found[SLOPES]
    assert f"it is {-1.5 / 9:.4g}, not " in found[SLOPES]


def test_every_loss_of_the_registry_passes() -> None:
    for name, loss in LOSSES.items():
        assert not any(finding.verdict == "FAIL" for finding in check_loss(loss)), name


def test_a_loss_may_compute_in_float32_make_tensors_of_its_own_and_read_every_field() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.logprobs - inputs.old_logprobs).float().exp()
        longest = torch.full((len(ratio),), 0.5).index_add(0, torch.arange(len(ratio)), inputs.entropies)
        longest = longest + inputs.sequence_sum(inputs.mask) + inputs.group_ids.clamp(min=0)
        losses = -ratio * inputs.advantages * longest
        return LossOutput(losses=losses, metrics={"mine/ratio": masked_mean(ratio, inputs.mask)})

    assert verdicts(loss) == {}


# ---- wrong ones: what comes back


def test_an_average_over_tokens_is_no_loss_for_each_token() -> None:
    text = failure(lambda inputs: output(inputs, torch.mean), SHAPES)
    assert 'its losses are (); one for each of 66 tokens is wanted, for input "on-policy"' in text


def test_a_tensor_is_no_loss_output() -> None:
    assert "it returned Tensor, not a LossOutput" in failure(lambda inputs: inputs.logprobs, SHAPES)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("metric", [1.0, (torch.ones(()), 1.0), (torch.ones(2), torch.ones(()))])
def test_a_metric_that_is_not_two_scalars_is_refused(metric: Any) -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=-inputs.logprobs, metrics={"mine/metric": metric})

    assert "metric 'mine/metric' is not (sum, weight)" in failure(loss, SHAPES)


def test_a_detached_loss_carries_no_gradient() -> None:
    text = failure(lambda inputs: output(inputs, torch.Tensor.detach), SHAPES)
    assert "carry no gradient" in text
    assert failure(lambda inputs: output(inputs, lambda losses: losses * 0), DEPENDS)


def test_what_fails_first_ends_the_checks() -> None:
    assert [finding.check for finding in check_loss(lambda inputs: output(inputs, torch.mean))] == [SHAPES]


def test_a_metric_with_a_name_of_the_trainer_is_refused_as_at_the_start_of_a_run() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(
            losses=-inputs.logprobs, metrics={"policy/entropy": masked_mean(inputs.logprobs, inputs.mask)}
        )

    assert "'policy/entropy', whose name is taken" in failure(loss, TAKEN)


# ---- wrong ones: chance, memory, side effects


def test_chance_is_noticed_in_losses_and_in_metrics() -> None:
    assert failure(lambda inputs: output(inputs, lambda losses: losses * random.random()), PURE)

    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=-inputs.logprobs, metrics={"mine/chance": (torch.rand(()), torch.ones(()))})

    assert failure(loss, PURE)


@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
def test_a_change_of_the_inputs_is_named(field: str) -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        getattr(inputs, field).clamp_(-1.0, 1.0)
        return reinforce(inputs)

    assert f"it changed inputs.{field} for input " in failure(loss, PURE)


# ---- wrong ones: numbers


def test_an_overflow_is_found_with_its_input_token_and_values() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        ratio = (5 * (inputs.logprobs - inputs.old_logprobs)).exp()  # exp(100) is more than float32 holds
        return LossOutput(losses=ratio)

    text = failure(loss, FINITE)
    assert 'losses are inf for input "log-ratio of 20" at token 0 of response 0 (logprobs -' in text


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=(inputs.logprobs - inputs.old_logprobs).abs().sqrt())

    assert f'FAIL {FINITE}: the gradient is nan for input "on-policy"' in failure(loss, FINITE)


def test_a_mean_over_nothing_is_found_in_a_metric() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        mean = inputs.advantages[inputs.mask].mean()
        return LossOutput(losses=-inputs.logprobs, metrics={"mine/mean": (mean * inputs.mask.sum(), inputs.mask.sum())})

    assert failure(loss, FINITE).endswith("metric 'mine/mean' is (nan, 0.0) for input \"no trained token\"")


def test_infinity_times_zero_that_reaches_a_sum_is_not_finite() -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        surprise = 1 / inputs.logprobs * inputs.mask  # log-probs outside the mask are 0
        return LossOutput(losses=surprise, metrics={"mine/surprise": (surprise.detach().sum(), inputs.mask.sum())})

    assert "metric 'mine/surprise' is (nan, " in failure(loss, FINITE)


def test_infinity_times_zero_that_stays_outside_the_mask_is_a_note() -> None:
    found = verdicts(lambda inputs: LossOutput(losses=1 / inputs.logprobs * inputs.mask))
    assert list(found) == [MASK]
    assert found[MASK].startswith(f"note {MASK}: the gradient is nan at a token outside the mask")


# ---- wrong ones: what a token's loss may depend on


def test_losses_that_look_at_tokens_outside_the_mask_are_found() -> None:
    found = verdicts(lambda inputs: output(inputs, lambda losses: losses - inputs.logprobs.mean()))
    assert "at a token outside the mask" in found[MASK]
    found = verdicts(lambda inputs: output(inputs, lambda losses: losses - inputs.entropies.sum()))
    assert "with other log-probs, advantages and entropies outside the mask" in found[MASK]


def own_mean(inputs: LossInputs) -> LossOutput:
    return output(inputs, lambda losses: losses / inputs.mask.sum().clamp(min=1))


def baseline_of_the_group(inputs: LossInputs) -> LossOutput:
    same = (inputs.group_ids[:, None] == inputs.group_ids) & inputs.mask
    baseline = (inputs.advantages * same).sum(1) / same.sum(1).clamp(min=1)
    return LossOutput(losses=-(inputs.advantages - baseline) * inputs.logprobs)


def scaled_by_the_batch(inputs: LossInputs) -> LossOutput:
    return output(inputs, lambda losses: losses / ((inputs.advantages.abs() * inputs.mask).max() + 1))


@pytest.mark.parametrize("loss", [own_mean, baseline_of_the_group, scaled_by_the_batch])
def test_losses_that_look_at_other_responses_depend_on_the_split(loss: Loss) -> None:
    found = verdicts(loss)
    assert set(found) - {CONTEXT} == {SPLIT}  # some see only a part of the batch on a context-parallel rank
    assert 'for input "on-policy" at token ' in found[SPLIT]
    assert "in 2 micro-batches instead of one" in found[SPLIT]


def test_a_loss_that_goes_by_the_place_of_a_response_depends_on_the_order() -> None:
    found = verdicts(lambda inputs: output(inputs, lambda losses: losses * (inputs.response_ids + 1)))
    assert set(found) == {SPLIT, ORDER}
    assert "with the responses in another order" in found[ORDER]


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_a_metric_that_is_a_mean_does_not_add_up(weight: float) -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        total, count = masked_mean(inputs.advantages.square(), inputs.mask)
        return LossOutput(
            losses=-inputs.logprobs, metrics={"mine/mean": (total / count.clamp(min=1), torch.tensor(weight))}
        )

    assert set(verdicts(loss)) == {METRICS}
    assert "'mine/mean' is (1." in failure(loss, METRICS)
    assert f"{weight}) in one micro-batch and (" in failure(loss, METRICS)


# ---- reference log-probs, exceptions


def with_divergence(inputs: LossInputs, *, clear: bool) -> LossOutput:
    if clear and inputs.reference_logprobs is None:
        raise ValueError("this loss needs algorithm.kl.coef above 0")
    kl = kl_estimates(inputs.logprobs, inputs.reference_logprobs, estimator="k2")  # type: ignore[arg-type]
    return LossOutput(losses=-inputs.advantages * inputs.logprobs + kl)


def test_a_loss_that_needs_a_reference_has_to_say_so() -> None:
    assert verdicts(partial(with_divergence, clear=True)) == {
        REFERENCE: f"note {REFERENCE}: it needs them and says so: this loss needs algorithm.kl.coef above 0"
    }
    text = failure(partial(with_divergence, clear=False), REFERENCE)
    assert "TypeError: unsupported operand" in text
    assert "reference_logprobs is None unless algorithm.kl asks for them" in text


def test_an_exception_is_told_with_the_input_and_the_last_line_of_the_users_file() -> None:
    def helper(inputs: LossInputs) -> torch.Tensor:
        return torch.cat((inputs.logprobs, inputs.advantages[inputs.mask].max()[None]))  # fails without tokens

    text = failure(lambda inputs: LossOutput(losses=helper(inputs)[:-1]), SHAPES)
    assert "RuntimeError: max(): " in text
    assert f"({__file__}:" in text
    assert ": return torch.cat((inputs.logprobs, inputs.advantages[inputs.mask].max()[None]))" in text
    assert text.endswith('for input "no trained token"')


def test_the_inputs_are_what_they_are_called() -> None:
    by_name = {example.name: example for example in EXAMPLES}
    inputs, _ = by_name["off-policy"].lay(range(9))
    assert sorted(by_name["off-policy"].lengths) == list(range(1, 10))
    assert inputs.group_ids.unique().tolist() == [-1, 0, 1, 2]
    assert not inputs.mask[[0, -1]].any()
    assert {float(one.sign()) for one in inputs.advantages[inputs.mask]} == {-1.0, 0.0, 1.0}
    for example in EXAMPLES:
        inputs, numbers = example.lay(range(len(example.lengths)))
        assert numbers[inputs.mask].tolist() == list(range(sum(example.lengths)))
        for name in ("logprobs", "old_logprobs", "rollout_logprobs"):
            assert (getattr(inputs, name) <= 0).all(), (example.name, name)
            assert (getattr(inputs, name)[~inputs.mask] == 0).all()
    inputs, _ = by_name["log-ratio of 20"].lay(range(9))
    assert (inputs.logprobs - inputs.old_logprobs).max().item() == pytest.approx(20)
    assert not by_name["no trained token"].lay([])[0].mask.any()


# ---- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`megatron-rl check-loss ARGUMENTS` beside a file of one's own losses: its exit code, and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "losses_of_a_user", raising=False)
    (tmp_path / "losses_of_a_user.py").write_text(
        "from megatron_rl.algorithms.losses import LossOutput\n\n\n"
        "def scaled(inputs, *, scale: float = 1.0):\n"
        "    return LossOutput(losses=-inputs.advantages * inputs.logprobs * scale)\n\n\n"
        "def broken(inputs):\n"
        "    return LossOutput(losses=inputs.logprob)\n"
    )

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["megatron-rl", "check-loss", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run


def test_the_command_prints_a_line_for_each_check(command: Any) -> None:
    code, said = command("losses_of_a_user:scaled", "scale=3e-1")
    assert code == 0
    assert said.splitlines() == [*(f"ok   {name}" for name in CHECKS), "0 of 12 checks failed"]
    code, said = command("cispo", "clip_high=3", "clip_low=null")
    assert (code, said.count("\nnote ")) == (0, 1)


def test_a_broken_loss_is_exit_code_1(command: Any, tmp_path: Path) -> None:
    code, said = command("losses_of_a_user:broken")
    assert code == 1
    assert f"AttributeError: 'LossInputs' object has no attribute 'logprob' ({tmp_path}/losses_of_a_user.py:9: " in said
    assert said.endswith("\n1 of 1 checks failed; 11 more wait for that one\n")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["losses_of_a_user:missing"], "error: algorithm.loss: losses_of_a_user:missing: "),
        (["no_such_module:f"], "error: algorithm.loss: no_such_module:f: No module named 'no_such_module'"),
        (["ppo_clop"], "error: algorithm.loss: 'ppo_clop' is neither a known name nor package.module:function"),
        (["ppo_clip", "clip_low=wide"], "error: algorithm.loss_kwargs.clip_low: "),
        (
            ["losses_of_a_user:scaled", "factor=2"],
            "error: algorithm.loss_kwargs: losses_of_a_user:scaled: got an unexp",
        ),
        (["ppo_clip", "clip_low"], "error: argument 'clip_low': write key=value"),
        (["ppo_clip", "clip_low=["], "error: arguments 'clip_low=[': "),
    ],
)
def test_bad_input_is_exit_code_2(arguments: list[str], mistake: str, command: Any) -> None:
    code, said = command(*arguments)
    assert (code, said[: len(mistake)]) == (2, mistake)


def test_what_the_page_shows_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/custom_loss.md").read_text(encoding="utf-8")
    parts = re.findall(r"^```python\n# my_losses.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_losses.py").write_text("\n".join(parts), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    shown = re.findall(r"^```console\n\$ megatron-rl (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 3
    for arguments, printed in shown:
        monkeypatch.setattr(sys, "argv", ["megatron-rl", *arguments.split()])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out == printed


def test_sums_of_ones_own_see_only_what_a_rank_holds() -> None:
    def own_sum(inputs: LossInputs) -> LossOutput:
        ids = inputs.response_ids + 1
        sums = inputs.logprobs.new_zeros(int(ids.max()) + 1).index_add(0, ids, inputs.logprobs)
        return output(inputs, lambda losses: losses * sums[ids].detach())

    assert "only inputs.sequence_sum sees all of a response" in failure(own_sum, CONTEXT)


def test_the_token_before_may_lie_on_another_rank() -> None:
    def smoothed(inputs: LossInputs) -> LossOutput:
        same = inputs.response_ids.roll(1) == inputs.response_ids
        before = torch.where(same, inputs.logprobs.roll(1).detach(), 0.0)
        return output(inputs, lambda losses: losses * before)

    assert "on another context-parallel rank" in failure(smoothed, CONTEXT)


def test_ranks_that_call_sequence_sum_unequally_often_would_wait_for_ever() -> None:
    def conditional(inputs: LossInputs) -> LossOutput:
        if not inputs.mask.any():
            return output(inputs, lambda losses: losses)
        lengths = inputs.sequence_sum(inputs.mask.to(inputs.logprobs.dtype)).clamp(min=1)
        return output(inputs, lambda losses: losses / lengths)

    assert "calls inputs.sequence_sum on one context-parallel rank more often" in failure(conditional, CONTEXT)
    assert torch.get_default_dtype() == torch.float32
