"""``rlalign check``: what the model will see, without training."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlalign.cli.errors import sentences
from rlalign.cli.trainer import TrainerCLI
from rlalign.data.labelled import LabelledBatch
from rlalign.data.preferences import PreferenceBatch
from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.datamodule import RolloutDataModule


class CheckCLI(TrainerCLI):
    """Takes the arguments of fit, and shows instead of training."""

    writes = False

    def fit(self, **kwargs: Any) -> None:
        """Build everything, and show the first prompt and what comes of it."""
        model, data = self.model, self.datamodule
        self.trainer.strategy.connect(model)  # as trainer.fit would, which has no stop before the first step
        model.trainer = data.trainer = self.trainer
        data.prepare_data()
        model.configure_model()
        data.setup("fit")
        console = Console(soft_wrap=True)
        if isinstance(data, RolloutDataModule):
            show_rollout(console, model, data)
        else:
            show_batch(console, model, next(iter(data.train_dataloader())))


def show_rollout(console: Console, model: Any, data: RolloutDataModule) -> None:
    """The first prompt, its ids, a few responses and their rewards."""
    assert data.train_prompts is not None
    prompt = data.train_prompts[0]
    console.rule("prompt, as rendered")
    console.print(Text(model.tokenizer.decode(prompt.ids)))
    console.rule(f"{len(prompt.ids)} token ids")
    console.print(Text(" ".join(map(str, prompt.ids))))
    console.rule("example, as rewards see it")
    for name, value in prompt.example.items():
        console.print(Text(f"{name}: {value}"))
    with data.sampling_from_policy():
        rollouts = data.sample([(prompt, sample) for sample in range(min(data.group_size, 4))], data.sampling, 0, 0)
    console.rule("responses (ids in the loss; the prompt is not)")
    table = Table("response", "ids", "ended", *rollouts[0].components, "total", "right")
    for rollout in rollouts:
        table.add_row(*_row(rollout))
    console.print(table)


def show_batch(console: Console, model: Any, batch: Any) -> None:
    """The first demonstration of a batch, or the first responses with what is said of them."""
    batch = getattr(batch, "batch", batch)
    if isinstance(batch, PreferenceBatch):
        margin = "" if batch.margin is None else f", margin {float(batch.margin[0]):g}"
        titles = [f"first pair: the preferred response{margin}", "first pair: the other response"]
    elif isinstance(batch, LabelledBatch):
        assert batch.desirable is not None
        titles = [f"response labelled {'good' if good else 'bad'}" for good in batch.desirable[:2]]
    else:
        titles = ["first demonstration"]
    for row, title in enumerate(titles):
        show_row(console, model, batch, row, title)


def show_row(console: Console, model: Any, batch: Any, row: int, title: str) -> None:
    """A row of a batch without its padding: its tokens, those that the loss counts marked."""
    ids, counted = batch.input_ids[row], batch.loss_mask[row]
    mask = getattr(batch, "attention_mask", None)
    real = torch.ones_like(ids).bool() if mask is None else mask[row]
    counted = torch.cat([counted.new_zeros(len(ids) - len(counted)), counted])[real].tolist()
    ids = ids[real].tolist()
    console.rule(f"{title}; what the loss counts is bold")
    text = Text()
    for token, is_counted in zip(ids, counted, strict=True):
        text.append(model.tokenizer.decode([token]), style="bold green" if is_counted else "dim")
    console.print(text)
    console.rule("token ids, those in the loss in brackets")
    console.print(
        Text(" ".join(f"[{i}]" if is_counted else str(i) for i, is_counted in zip(ids, counted, strict=True)))
    )


def _row(rollout: Rollout) -> list[str]:
    numbers = [*rollout.components.values(), rollout.reward]
    ids = " ".join(map(str, rollout.token_ids.tolist()))
    scores = ["-" if value is None else f"{value:g}" for value in numbers]
    return [rollout.text, ids, "no" if rollout.truncated else "yes", *scores, "yes" if rollout.correct else "no"]


def main(argv: Sequence[str]) -> int:
    """Check what the arguments of fit say."""
    with sentences():
        CheckCLI(["fit", *argv[1:]])
    return 0
