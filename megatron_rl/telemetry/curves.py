"""curves.png of a run: what was learned, and what it cost in length, entropy and clipping."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PANELS = (
    ("share of right answers", (("rollout/accuracy", "sampled in training"), ("eval/accuracy", "held out"))),
    ("response length, tokens", (("rollout/length_right", "right answers"), ("rollout/length_wrong", "wrong answers"))),
    ("entropy of the policy, nats", (("policy/entropy", ""),)),
    ("share of clipped tokens", (("loss/clip_fraction", ""),)),
)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the rows of a metrics.jsonl into a PNG."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, series) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for key, label in series:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                marker = "o" if key.startswith("eval/") else None
                axes.plot(*zip(*points, strict=True), label=label or None, marker=marker)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("rollout step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
