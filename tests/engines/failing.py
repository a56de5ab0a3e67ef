"""A grader that makes an SGLang server fail at a given moment: when the first answer to a given row is graded.

So it happens in mid-rollout, whatever the machine's speed. A row's `fail` says how: `signal` goes to all processes that
write to `log`, once, which the file `once` remembers.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from megatron_rl.rewards.graders import after_marker
from megatron_rl.types import Prompt
from tests.engines.processes import writing_to


def grade(prompt: Prompt, text: str, finished: bool) -> float:
    """As `after_marker`, after the row's failure."""
    if fail := prompt.metadata.get("fail"):
        with suppress(FileExistsError):
            os.close(os.open(fail["once"], os.O_CREAT | os.O_EXCL))
            processes = writing_to(Path(fail["log"]))
            Path(fail["once"]).write_text(" ".join(map(str, processes)))
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.Signals[fail["signal"]])
    return after_marker(prompt, text, finished, marker="#")
