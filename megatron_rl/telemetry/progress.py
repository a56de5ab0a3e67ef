"""What a run says while it runs: a line for each step, on rank 0."""

import time
from collections.abc import Mapping

from rich.console import Console

_COLUMNS = (
    ("reward", "batch/reward", "{:+.3f}"),
    ("acc", "rollout/accuracy", "{:.3f}"),
    ("len", "rollout/length", "{:.1f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("clip", "loss/clip_fraction", "{:.4f}"),
    ("grad", "train/grad_norm", "{:.3g}"),
    ("kept", "rollout/groups_kept", "{:.0f}"),
)


class _Terminal(Console):
    """Goes silent when the reader of its output has gone (rich would end the run)."""

    def on_broken_pipe(self) -> None:
        """What rich calls."""
        self.quiet = True


class Progress:
    """Prints steps, evaluations and events with the time left."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self.steps = steps
        self.console = _Terminal(quiet=quiet, highlight=False, soft_wrap=True)
        self._first: tuple[float, int] | None = None

    def say(self, text: str) -> None:
        """Any other line."""
        self.console.print(text, markup=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One rollout step: what was learned, and seconds per phase."""
        now = time.monotonic()
        left = ""
        if self._first is None:
            self._first = (now, step)
        elif step > self._first[1]:
            left = f" · {(now - self._first[0]) / (step - self._first[1]) * (self.steps - step):.0f}s left"
        figures = "  ".join(f"{name} {form.format(metrics[key])}" for name, key, form in _COLUMNS if key in metrics)
        seconds = "  ".join(
            f"{name.removeprefix('seconds/')} {value:.2f}s"
            for name, value in metrics.items()
            if name.startswith("seconds/")
        )
        self.say(f"step {step:>{len(str(self.steps))}}/{self.steps}  {figures}  |  {seconds}{left}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One evaluation."""
        keys = ("accuracy", "length_right", "length_wrong", "truncated")
        figures = "  ".join(f"{key} {metrics['eval/' + key]:.3f}" for key in keys if "eval/" + key in metrics)
        self.say(f"held-out, after step {step}:  {figures}  |  {metrics['seconds/evaluation']:.2f}s")
