r"""The grader `math`: whether the last \boxed{} of a response means the same as the answer, by math-verify."""

import logging

from math_verify import parse, verify

from megatron_rl.types import Prompt

# It warns, in each process, that its own timeouts are off. They are signals, work in a main thread only, and don't
# reach a power tower; the deadline of the process does.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_as_last_box(prompt: Prompt, text: str, finished: bool) -> float:
    r"""1 if the last `\boxed{}` means the same as `prompt.answer`; 0 if not, or if there is none.

    A response that was cut off after its box is graded by it. Nothing else in the text counts: math-verify reads
    "\boxed{4} then \boxed{5}" as the set of both.

    Raises:
        ValueError: the row's answer has no meaning to math-verify, so no response can be graded by it.
    """
    gold = prompt.answer if "$" in prompt.answer or "\\boxed" in prompt.answer else f"\\boxed{{{prompt.answer}}}"
    meant = parse(gold, parsing_timeout=None)
    if not meant:
        raise ValueError(f"math-verify can't read the answer {prompt.answer!r} of row {prompt.index}")
    box = last_box(text)
    if box is None:
        return 0.0
    return float(verify(meant, parse(f"\\boxed{{{box}}}", parsing_timeout=None), timeout_seconds=None))


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{}`, braces within it included; None without one, or if it is not closed."""
    _, found, rest = text.rpartition("\\boxed")
    rest = rest.lstrip()
    if not found or not rest.startswith("{"):
        return None
    depth = place = 0
    while place < len(rest):
        if rest[place] == "\\":
            place += 1  # an escaped brace is a sign, not a bracket
        elif rest[place] == "{":
            depth += 1
        elif rest[place] == "}":
            depth -= 1
            if depth == 0:
                return rest[1:place]
        place += 1
    return None
