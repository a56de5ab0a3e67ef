"""A grader and a loss that make an SGLang server fail at a given moment, whatever the machine's speed.

A signal goes to all processes that write to `log`, once, which the file `once` remembers.
"""

import os
from contextlib import suppress
from pathlib import Path
from signal import Signals

from megatron_rl.algorithms.losses import LossInputs, LossOutput, ppo_clip
from megatron_rl.rewards.graders import after_marker
from megatron_rl.types import Prompt
from tests.engines.processes import writing_to


def grade(prompt: Prompt, text: str, finished: bool) -> float:
    """As `after_marker`, after the row's failure: in mid-rollout, when its first answer is graded."""
    if fail := prompt.metadata.get("fail"):
        strike(**fail)
    return after_marker(prompt, text, finished, marker="#")


def loss(inputs: LossInputs, *, log: str, once: str) -> LossOutput:
    """As `ppo_clip`, after the failure: while all train, as soon as there is a server."""
    if writing_to(Path(log)):
        strike("SIGKILL", log, once)
    return ppo_clip(inputs)


def strike(signal: str, log: str, once: str) -> None:
    """Send the signal, if this is the first time."""
    with suppress(FileExistsError):
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        processes = writing_to(Path(log))
        Path(once).write_text(" ".join(map(str, processes)))
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, Signals[signal])
