"""A reference that follows the policy."""

from typing import Any

from lightning import Callback, LightningModule, Trainer

from rlalign.callbacks.guard import rolled_back
from rlalign.models.reference import pairs_of_weights, update_reference


class ReferenceSync(Callback):
    r"""Moves the reference to the policy, or towards it, after every ``every`` iterations.

    .. math:: \theta_{ref} \leftarrow \alpha\, \theta + (1 - \alpha)\, \theta_{ref}

    So that the KL holds the policy near where it was lately, not near its start (TR-DPO, Gorbatovski et al. 2024,
    https://arxiv.org/abs/2404.09656). An iteration that was rolled back is left out. The weights of the reference are
    in the checkpoint. With LoRA the reference is an adapter of its own, which can only be copied.

    Args:
        every: Iterations from one update to the next.
        alpha: In ``(0, 1]``; 1 copies the policy.

    Raises:
        ValueError: If a number is out of bounds.
    """

    def __init__(self, every: int, alpha: float = 1.0) -> None:
        if every < 1 or not 0 < alpha <= 1:
            raise ValueError(f"ReferenceSync: expected every >= 1 and alpha in (0, 1], got {every} and {alpha}.")
        self.every, self.alpha = every, alpha

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the module build a reference that can be moved.

        Raises:
            ValueError: If it has no policy, or its adapters cannot be mixed.
        """
        if stage != "fit":
            return
        module: Any = pl_module
        if not hasattr(module, "moves_reference"):
            raise ValueError(f"ReferenceSync: {type(module).__name__} has no policy with a reference.")
        if module.policy_config.uses_lora and self.alpha < 1:
            raise ValueError(
                "ReferenceSync: a mean of two adapters' factors is none of what they add: use alpha=1 with LoRA."
            )
        module.moves_reference = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the module uses a reference.

        Raises:
            ValueError: If it does not.
        """
        module: Any = pl_module
        if not module.needs_reference:
            raise ValueError(
                f"ReferenceSync: {type(module).__name__} has no reference as it is configured (kl_coef above 0, kl_to "
                "reference)."
            )
        pairs_of_weights(module.policy)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move it, if it is time."""
        module: Any = pl_module
        if (trainer.current_epoch + 1) % self.every == 0 and not rolled_back(trainer):
            update_reference(module.policy, self.alpha)
