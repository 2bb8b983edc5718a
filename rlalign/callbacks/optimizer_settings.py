"""What the optimizers of a run were configured with, which a checkpoint overrules on resuming."""

from typing import Any

from lightning import Trainer

Settings = list[list[dict[str, Any]]]
"""Name -> plain value, of every parameter group of every optimizer."""


def optimizer_settings(trainer: Trainer) -> Settings:
    """The settings now; the learning rate is that which its schedule multiplies."""
    return [[_of_group(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _of_group(group: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple | None)}
    if "initial_lr" in plain:
        plain["lr"] = plain.pop("initial_lr")
    return plain


def describe_differences(configured: Settings, kept: Settings) -> str | None:
    """A sentence that names the settings of a checkpoint that differ from those configured; ``None`` if none does."""
    pairs = [
        (theirs, ours) for groups in zip(kept, configured, strict=False) for theirs, ours in zip(*groups, strict=False)
    ]
    differing = [
        f"{name}={theirs[name]} (configured: {ours[name]})"
        for theirs, ours in pairs
        for name in theirs
        if name in ours and ours[name] != theirs[name]
    ]
    if not differing:
        return None
    return (
        "A run goes on with the optimizer of its checkpoint, whatever is configured now: "
        f"{', '.join(dict.fromkeys(differing))}."
    )
