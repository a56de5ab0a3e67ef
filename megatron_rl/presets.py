"""The objectives by name: nothing but values of the switches, each with its source."""

from typing import Any

_LOSS = {"loss": "ppo_clip", "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.2}}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. (2024), DeepSeekMath, eq. 3, without the KL term.
    "grpo": {"algorithm": {"advantage": "grpo", "normalisation": "sequence_mean", **_LOSS}},
    # Yu et al. (2025): eq. 8 (group-level token mean, asymmetric clip), eq. 11 (dynamic sampling), eq. 13, rewards ±1.
    "dapo": {
        "algorithm": {
            "advantage": "grpo",
            "normalisation": "token_mean_group",
            "loss": "ppo_clip",
            "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.28},
            "dynamic_sampling": True,
            "soft_overlong": {"buffer": 4096},
        },
        "rewards": {"wrong": -1.0},
    },
    # Liu et al. (2025), "Understanding R1-Zero-like training": no std, one constant for all answers.
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "normalisation": "constant", **_LOSS}},
    # Ahmadian et al. (2024): leave-one-out baseline; G/(G − 1) times Dr. GRPO.
    "rloo": {"algorithm": {"advantage": "rloo", "normalisation": "constant", **_LOSS}},
}
