"""The objectives by name: nothing but values of the switches, each with its source."""

from typing import Any

_SYMMETRIC = {"loss": "ppo_clip", "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.2}}
_CLIP_HIGHER = {"loss": "ppo_clip", "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.28}}
_PLUS_MINUS_ONE = {"rewards": {"wrong": -1.0}}


def _dapo_rung(**algorithm: Any) -> dict[str, Any]:
    """A rung of DAPO's ablation (Yu et al., 2025, table 1), on GRPO with rewards of ±1."""
    naive = {"advantage": "grpo", "normalisation": "sequence_mean", **_SYMMETRIC}
    return {"algorithm": naive | algorithm, **_PLUS_MINUS_ONE}


_SOFT = {"soft_overlong": {"buffer": 4096}}
_TOKEN_LEVEL = {"normalisation": "token_mean_group"}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. (2024), DeepSeekMath, eq. 3, without the KL term.
    "grpo": {"algorithm": {"advantage": "grpo", "normalisation": "sequence_mean", **_SYMMETRIC}},
    # Yu et al. (2025): eq. 8 (group-level token mean, asymmetric clip), eq. 11 (dynamic sampling), eq. 13, rewards ±1.
    "dapo": _dapo_rung(**_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL, dynamic_sampling=True),
    # The same with the tokens of the whole step as normaliser, as verl and TRL have it.
    "dapo_batch": _dapo_rung(**_CLIP_HIGHER, **_SOFT, normalisation="token_mean_batch", dynamic_sampling=True),
    # Liu et al. (2025), "Understanding R1-Zero-like training": no std, one constant for all answers.
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "normalisation": "constant", **_SYMMETRIC}},
    # Ahmadian et al. (2024): leave-one-out baseline; G/(G − 1) times Dr. GRPO.
    "rloo": {"algorithm": {"advantage": "rloo", "normalisation": "constant", **_SYMMETRIC}},
    # Zheng et al. (2025), eq. 5 and section 5.1 (clipping ranges).
    "gspo": {
        "algorithm": {
            "advantage": "grpo",
            "normalisation": "sequence_mean",
            "loss": "gspo",
            "loss_kwargs": {"clip_low": 3e-4, "clip_high": 4e-4},
        }
    },
    # MiniMax-M1 (2025), eq. 4: GRPO's advantage, the tokens of a group as normaliser, dynamic sampling as in DAPO.
    "cispo": {
        "algorithm": {
            "advantage": "grpo",
            "normalisation": "token_mean_group",
            "loss": "cispo",
            "loss_kwargs": {"clip_low": None, "clip_high": 4.0},
            "dynamic_sampling": True,
        }
    },
    # Yu et al. (2025), table 1, AIME 2024 on Qwen2.5-32B: 30, 36, 38, 41, 42, 50. The soft punishment takes the place
    # of the mask, as it does in DAPO itself; the paper does not say whether both were on.
    "dapo_ladder_1": _dapo_rung(),
    "dapo_ladder_2": _dapo_rung(mask_truncated=True),
    "dapo_ladder_3": _dapo_rung(mask_truncated=True, **_CLIP_HIGHER),
    "dapo_ladder_4": _dapo_rung(**_CLIP_HIGHER, **_SOFT),
    "dapo_ladder_5": _dapo_rung(**_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL),
    "dapo_ladder_6": _dapo_rung(**_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL, dynamic_sampling=True),
}
