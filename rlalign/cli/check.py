"""``rlalign check``: what the model will see, without training."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlalign.cli.errors import sentences
from rlalign.cli.trainer import TrainerCLI
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
    rollouts = data.sample([(prompt, sample) for sample in range(min(data.group_size, 4))], data.sampling, 0, 0)
    console.rule("responses (ids in the loss; the prompt is not)")
    table = Table("response", "ids", "ended", *rollouts[0].components, "total", "right")
    for rollout in rollouts:
        table.add_row(*_row(rollout))
    console.print(table)


def show_batch(console: Console, model: Any, batch: Any) -> None:
    """The first row of a batch of demonstrations: its tokens, those that the loss counts marked."""
    batch = getattr(batch, "batch", batch)
    ids, counted = batch.input_ids[0].tolist(), batch.loss_mask[0].tolist()
    console.rule("first demonstration; what the loss counts is bold")
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
