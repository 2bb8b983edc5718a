"""A picture of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning import Callback, LightningModule, Trainer

from rlalign.callbacks.coefficients import fresh_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: dict[str, dict[str, str]] = {
    "pass@1": {"rollout/pass@1": "training prompts", "val/pass@1": "held out"},
    "reward": {"rollout/reward": "reward"},
    "loss": {"train/loss": "training data", "val/loss": "held out"},
    "pairs in the right order": {
        "train/preference_accuracy": "training data",
        "val/preference_accuracy": "held out",
        "train/accuracy": "training data, by score",
        "val/accuracy": "held out, by score",
        "rollout/value_accuracy": "sampled, by V",
    },
    "margin of pairs": {
        "train/reward_margin": "reward, training data",
        "val/reward_margin": "reward, held out",
        "train/score_margin": "score, training data",
        "val/score_margin": "score, held out",
    },
    "KL (nats a token)": {"train/kl_ref": "to the reference", "train/kl_step": "of an iteration"},
    "entropy (nats a token)": {"train/entropy": "entropy"},
    "response length (tokens)": {"rollout/length_mean": "mean"},
    "share of responses and groups": {
        "rollout/truncated_share": "cut by the length limit",
        "rollout/zero_std_share": "groups without signal",
    },
    "gradient norm": {"train/grad_norm": "before clipping"},
    "share of clipped tokens": {"train/clip_low": "below", "train/clip_high": "above"},
}
"""Titles, and the metrics of each panel by the names in its legend."""
SHARES = ("pass@1", "share of responses and groups", "pairs in the right order")
"""Titles of panels that reach from 0 to 1."""


class CurvePlot(Callback):
    """Draws the curves of a run to a PNG in the run folder, at its end and every so many iterations.

    Args:
        every: Iterations from one drawing to the next; only at the end by default.
        file: Name of the picture, in the run folder.
        panels: Titles, and for each the metrics and their names in the legend; panels without a value are left out.
        live: In a notebook, show the picture and keep it up to date.

    Raises:
        ValueError: If ``every`` is below 1 or the file is no PNG.
    """

    def __init__(
        self,
        every: int | None = None,
        file: str = "curves.png",
        panels: dict[str, dict[str, str]] | None = None,
        live: bool = False,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"CurvePlot: every must be at least 1, got {every}.")
        if not file.endswith(".png"):
            raise ValueError(f"CurvePlot: file must end in .png, got {file}.")
        self.every, self.file, self.live = every, file, live
        self.panels = PANELS if panels is None else panels
        self.history: dict[str, list[list[float]]] = {}
        """Pairs of iteration and value, by metric."""
        self._display: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out now whether there is a notebook to draw in.

        Raises:
            ModuleNotFoundError: If IPython is not installed.
        """
        if self.live:
            try:
                import IPython.display  # noqa: F401
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError("CurvePlot: live=True needs IPython, that is, a notebook.") from error

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the iteration's values."""
        wanted = {name for metrics in self.panels.values() for name in metrics}
        values = fresh_metrics(trainer)
        for name in sorted(wanted & values.keys()):
            self.history.setdefault(name, []).append([float(trainer.current_epoch), values[name]])
        if trainer.is_global_zero and self.every and (trainer.current_epoch + 1) % self.every == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the whole run."""
        if trainer.is_global_zero and self.history:
            self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The values so far."""
        return {"history": {name: [list(pair) for pair in pairs] for name, pairs in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        self.history = state_dict["history"]

    def _draw(self, trainer: Trainer) -> None:
        path = Path(trainer.default_root_dir) / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = draw_curves(self.history, self.panels, title=path.parent.name)
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, format="png", dpi=130)
        os.replace(partial, path)
        if self.live:
            from IPython.display import Image, display

            image = Image(data=path.read_bytes())
            if self._display is None:
                self._display = display(image, display_id=True)
            else:
                self._display.update(image)


def draw_curves(
    history: dict[str, list[list[float]]], panels: dict[str, dict[str, str]] = PANELS, title: str = ""
) -> "Figure":
    """A figure with a panel for each title that has values.

    Args:
        history: Pairs of iteration and value, by metric.
        panels: Titles, and the metrics of each by their names in the legend.
        title: Of the figure.
    """
    from matplotlib.figure import Figure  # no pyplot: the program's own figures and backend are left alone

    shown = {name: metrics for name, metrics in panels.items() if any(history.get(m) for m in metrics)}
    columns = min(4, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for number, (name, metrics) in enumerate(shown.items(), 1):
        _draw_panel(figure.add_subplot(rows, columns, number), name, metrics, history)
    return figure


def _draw_panel(axes: "Axes", title: str, metrics: dict[str, str], history: dict[str, list[list[float]]]) -> None:
    from matplotlib.ticker import MaxNLocator

    names = [m for m in metrics if history.get(m)]
    for name in names:
        iterations, values = zip(*history[name], strict=True)
        few = len(values) < 30
        axes.plot(iterations, values, label=metrics[name], linewidth=1.6, marker="o" if few else None, markersize=2.5)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("iteration", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if title in SHARES:
        axes.set_ylim(-0.03, 1.03)
    if len(metrics) > 1:
        axes.legend(fontsize=8, frameon=False)
