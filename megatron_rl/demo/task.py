"""The running-sum task: its problems, demonstrations, tokenizer and dataset files.

A prompt is four to six digits and `=`; the answer is their sum modulo 10. A full response writes, for each digit, the
digit and the running sum modulo 10, then `#`, the answer, end of sequence: `6620=` gives `66622404#4`. How much of that
scratch to write is the model's choice: a guess at once (`#7`) is right one time in ten.
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from megatron_rl.files import replace_text

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(3)

VOCABULARY = (*SPECIAL_TOKENS, *"0123456789", *"=#:.+-<>|?")
"""The 23 tokens in the order of their ids. The task uses digits, `=` and `#`; the rest are ways to be wrong."""

MIN_DIGITS = 4
MAX_DIGITS = 6

MAX_RESPONSE_TOKENS = 2 * MAX_DIGITS + 3
"""Longest right response: a pair for each digit, `#`, the answer, `<eos>`."""

HELDOUT_SEED = 999
"""Seed of the demo's held-out set. The base model never sees its first `RECIPE.heldout_problems` problems."""

MAX_DISTINCT_PROBLEMS = 500_000
"""Most problems one set may hold: rejection sampling stays quick, as there are 1,110,000 of them."""


@dataclass(frozen=True)
class Problem:
    """One row of a dataset."""

    prompt: str
    """The digits and `=`, as `6620=`."""

    answer: str
    """One digit, the sum of the prompt's digits modulo 10."""


@dataclass(frozen=True, kw_only=True)
class DemonstrationStyle:
    """How demonstrations depart from the full and right scratch. All zeros: they never do."""

    direct_guess: float = 0.0
    """Probability that a demonstration has no scratch at all, only `#` and a random digit."""

    early_stop: float = 0.0
    """Probability, before each digit, that the scratch ends there and a random digit is the answer."""

    noise: float = 0.0
    """Probability that a running sum is replaced by a random digit, from which the next sums go on."""

    def __post_init__(self) -> None:
        for name, probability in asdict(self).items():
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{name} is a probability, in 0..1, got {probability}")


def draw_problem(rng: random.Random) -> Problem:
    """One problem; each length is equally likely, then each digit."""
    digits = [rng.randrange(10) for _ in range(rng.randint(MIN_DIGITS, MAX_DIGITS))]
    return Problem(prompt="".join(map(str, digits)) + "=", answer=str(sum(digits) % 10))


def problem_stream(rng: random.Random, excluded: Collection[Problem] = frozenset()) -> Iterator[Problem]:
    """Problems without end, none of `excluded`; the same problem may come again."""
    excluded = frozenset(excluded)
    while True:
        problem = draw_problem(rng)
        if problem not in excluded:
            yield problem


def heldout_problems(n: int, seed: int = HELDOUT_SEED) -> list[Problem]:
    """The first `n` distinct problems of `seed`, for evaluation; a smaller `n` gives a prefix of a larger one."""
    return _distinct(problem_stream(random.Random(f"heldout-{seed}")), n)


def training_problems(n: int, seed: int, heldout: Collection[Problem]) -> list[Problem]:
    """The first `n` distinct problems of `seed` that are not in `heldout`."""
    return _distinct(problem_stream(random.Random(f"training-{seed}"), heldout), n)


def _distinct(problems: Iterator[Problem], n: int) -> list[Problem]:
    if not 0 <= n <= MAX_DISTINCT_PROBLEMS:
        raise ValueError(f"a set holds 0..{MAX_DISTINCT_PROBLEMS} distinct problems, got n={n}")
    found: dict[Problem, None] = {}  # a set that keeps the order of arrival
    while len(found) < n:
        found[next(problems)] = None
    return list(found)


def demonstrate(problem: Problem, style: DemonstrationStyle, rng: random.Random) -> str:
    """A response to imitate, without `<eos>`."""
    if rng.random() < style.direct_guess:
        return f"#{rng.randrange(10)}"
    scratch, running_sum = "", 0
    for digit in problem.prompt.removesuffix("="):
        if rng.random() < style.early_stop:
            return f"{scratch}#{rng.randrange(10)}"
        running_sum = (running_sum + int(digit)) % 10
        if rng.random() < style.noise:
            running_sum = rng.randrange(10)
        scratch += f"{digit}{running_sum}"
    return f"{scratch}#{running_sum}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; encoding puts `<bos>` first and drops characters outside the vocabulary."""
    # AutoTokenizer loads whatever lies beside a Qwen2 model as this class, with its normalizer, splitting and decoder,
    # so the tokenizer is this class from the start. Left to its default, the unknown token would add a 24th, beyond
    # the model's vocabulary; without merges, every character stands alone.
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(VOCABULARY)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer


def write_jsonl(path: Path, problems: Iterable[Problem]) -> None:
    """Writes one `{"prompt": ..., "answer": ...}` a line; `path` appears, or is replaced, only once complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps(asdict(problem)) + "\n" for problem in problems))
