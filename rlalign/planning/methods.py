"""What a method keeps in memory beside the policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodParts:
    """What a method keeps and computes, with its defaults."""

    samples: bool = True
    """Whether it samples responses in the run."""
    reference: bool = False
    """Whether it keeps a frozen reference."""
    critic: bool = False
    """Whether a second model of the same size is trained: a critic, or a value function of responses."""
    scalar: bool = False
    """Whether what is trained is that model alone (a reward model): no logits."""
    sequences: int = 1
    """Sequences of an item of a minibatch: 2 for pairs."""


METHODS: dict[str, MethodParts] = {
    "sft": MethodParts(samples=False),
    "reward_model": MethodParts(samples=False, scalar=True, sequences=2),
    "dpo": MethodParts(samples=False, reference=True, sequences=2),
    "simpo": MethodParts(samples=False, sequences=2),
    "orpo": MethodParts(samples=False, sequences=2),
    "kto": MethodParts(samples=False, reference=True),
    "grpo": MethodParts(reference=True),
    "dapo": MethodParts(),
    "dr_grpo": MethodParts(),
    "gspo": MethodParts(),
    "cispo": MethodParts(),
    "rloo": MethodParts(reference=True),
    "reinforce_plus_plus": MethodParts(reference=True),
    "ppo": MethodParts(reference=True, critic=True),
    "online_dpo": MethodParts(reference=True, sequences=2),
    "direct_alignment_po": MethodParts(sequences=2),
    "gradient_regularized_po": MethodParts(critic=True),
    "generalized_rpo": MethodParts(critic=True),
    "distributed_adaptive_po": MethodParts(),
    "value_response": MethodParts(reference=True, critic=True),
}
"""By the name of its file in ``configs``; a test compares them with the classes."""
