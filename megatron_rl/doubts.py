"""Settings that work and are probably not meant; a run says them at its start."""

from megatron_rl.config import Config


def doubts(config: Config) -> list[str]:
    """What works and is probably not meant, each with the reason."""
    found = []
    kl = config.algorithm.kl
    if config.rewards.learned and kl.coef == 0:
        found.append(
            "algorithm.kl.coef is 0 with a learned or remote reward: training without KL rests on rule-based rewards, "
            "which stay right wherever the policy goes; a learned one is right only near the policy it was made for"
        )
    if kl.coef > 0 and kl.estimator == "k1" and kl.place == "loss":
        found.append(
            "algorithm.kl: the gradient of k1 in the loss is 0 on average, so it holds nothing back; "
            "take k2 or k3, or place=reward"
        )
    if kl.coef > 0 and kl.place == "reward" and config.algorithm.advantage in ("grpo", "reinforce_plus_plus_baseline"):
        found.append(
            "algorithm.kl.place=reward with an advantage that divides by the standard deviation: in a group of equal "
            "scores nothing but KL is left, and it is scaled up to full size; take advantage=dr_grpo or place=loss"
        )
    off_policy = config.rollout.max_staleness > 0 and config.algorithm.old_logprobs == "trainer"
    if off_policy and config.algorithm.correction is None:
        found.append(
            "rollout.max_staleness: tokens that older weights sampled are trained on as if the current ones had; leave "
            "algorithm.correction as it is by default, or set algorithm.old_logprobs=rollout"
        )
    return found
