"""The objectives by name: nothing but values of the switches, each with its source."""

from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """Values of options, by section."""

    source: str
    """Where they are from; `train --show` prints it."""

    algorithm: Values
    rewards: Values


_SYMMETRIC = {"loss": "ppo_clip", "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.2}}
_CLIP_HIGHER = {"loss": "ppo_clip", "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.28}}
_GRPO = {"advantage": "grpo", "normalisation": "sequence_mean", **_SYMMETRIC}
_SOFT = {"soft_overlong": {"buffer": 4096}}
_TOKEN_LEVEL = {"normalisation": "token_mean_group"}


def _dapo(source: str, **algorithm: Any) -> Preset:
    """GRPO with rewards of ±1, and what DAPO changes."""
    return Preset(f"Yu et al. (2025), {source}", _GRPO | algorithm, {"wrong": -1.0})


def _rung(number: int, **algorithm: Any) -> Preset:
    # The soft punishment takes the place of the mask, as in DAPO itself; the paper does not say whether both were on.
    scores = (30, 36, 38, 41, 42, 50)
    return _dapo(f"table 1, row {number}: {scores[number - 1]} on AIME 2024 with Qwen2.5-32B", **algorithm)


PRESETS: dict[str, Preset] = {
    "grpo": Preset("Shao et al. (2024), DeepSeekMath, eq. 3, without its KL term", _GRPO, {}),
    "dapo": _dapo("eq. 8, 11 and 13, rewards of ±1", **_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL, dynamic_sampling=True),
    "dapo_batch": _dapo(
        "with the tokens of the whole step as normaliser, as verl and TRL have it",
        **_CLIP_HIGHER,
        **_SOFT,
        normalisation="token_mean_batch",
        dynamic_sampling=True,
    ),
    "dr_grpo": Preset(
        "Liu et al. (2025), section 3.2: no standard deviation, one constant for all answers",
        {"advantage": "dr_grpo", "normalisation": "constant", **_SYMMETRIC},
        {},
    ),
    "rloo": Preset(
        "Ahmadian et al. (2024), leave-one-out; G/(G - 1) times Dr. GRPO",
        {"advantage": "rloo", "normalisation": "constant", **_SYMMETRIC},
        {},
    ),
    "gspo": Preset(
        "Zheng et al. (2025), eq. 5, clipping ranges of section 5.1",
        _GRPO | {"loss": "gspo", "loss_kwargs": {"clip_low": 3e-4, "clip_high": 4e-4}},
        {},
    ),
    "cispo": Preset(
        "MiniMax-M1 (2025), eq. 4: the tokens of a group as normaliser, dynamic sampling as in DAPO",
        {
            "advantage": "grpo",
            "loss": "cispo",
            "loss_kwargs": {"clip_low": None, "clip_high": 4.0},
            "dynamic_sampling": True,
            **_TOKEN_LEVEL,
        },
        {},
    ),
    "dapo_ladder_1": _rung(1),
    "dapo_ladder_2": _rung(2, mask_truncated=True),
    "dapo_ladder_3": _rung(3, mask_truncated=True, **_CLIP_HIGHER),
    "dapo_ladder_4": _rung(4, **_CLIP_HIGHER, **_SOFT),
    "dapo_ladder_5": _rung(5, **_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL),
    "dapo_ladder_6": _rung(6, **_CLIP_HIGHER, **_SOFT, **_TOKEN_LEVEL, dynamic_sampling=True),
}
