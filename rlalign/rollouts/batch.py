"""The one container that rollouts travel in."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(slots=True)
class RolloutBatch:
    """Padded rollouts; row ``b`` is one response, and the samples of one prompt are adjacent.

    ``B`` rollouts, ``P`` prompt tokens (left-padded), ``T`` response tokens (right-padded). Log-probabilities are in nats,
    float32, and of the full distribution at ``temperature``. Fields that start as ``None`` are filled by whoever needs them.
    """

    input_ids: Tensor
    """Prompt then response tokens, ``[B, P + T]``, int64."""
    attention_mask: Tensor
    """True on real tokens, ``[B, P + T]``."""
    response_mask: Tensor
    """True on response tokens up to and with the end token, ``[B, T]``."""
    loss_mask: Tensor
    """True on the tokens that the loss counts, ``[B, T]``; a subset of ``response_mask``."""
    prompt_index: Tensor
    """Which prompt of the data set, ``[B]``, int64."""
    sample_index: Tensor
    """Which sample of that prompt, ``[B]``, int64."""
    truncated: Tensor
    """True where the response was cut by the length limit, ``[B]``."""
    rewards: Tensor
    """Weighted sum of the rewards, ``[B]``, float32; 0 where not ``valid``."""
    valid: Tensor
    """False where a reward could not be computed: the row takes no part in statistics or loss, ``[B]``."""
    correct: Tensor
    """True where the reward that tells right from wrong says right, ``[B]``."""
    components: dict[str, Tensor] = field(default_factory=dict)
    """Each reward by name before weighting, ``[B]``, NaN where it was not computed."""
    sampler_logprobs: Tensor | None = None
    """Of the response tokens, as the sampler computed them, ``[B, T]``."""
    old_logprobs: Tensor | None = None
    """Of the response tokens under the policy before the iteration's first step, ``[B, T]``; ``None``: the current one."""
    ref_logprobs: Tensor | None = None
    """Of the response tokens under the frozen reference, ``[B, T]``."""
    advantages: Tensor | None = None
    """``[B, 1]`` a response or ``[B, T]`` a token."""
    temperature: float = 1.0
    """Of the distribution that was sampled; every log-probability is of this distribution."""
    step_tokens: float = 0.0
    """Tokens in ``loss_mask`` of the whole optimizer step, over all minibatches and ranks."""
    step_sequences: float = 0.0
    """Rows with at least one such token in the whole optimizer step."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def response_lengths(self) -> Tensor:
        """Response tokens of each row, ``[B]``."""
        return self.response_mask.sum(-1)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RolloutBatch":
        """The batch with ``fn`` applied to every tensor."""
        changed: dict = {f.name: fn(v) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **changed, components={k: fn(v) for k, v in self.components.items()})

    def __getitem__(self, rows: Tensor | slice) -> "RolloutBatch":
        return self.map(lambda x: x[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RolloutBatch":
        """The batch on another device."""
        return self.map(lambda x: x.to(device, non_blocking=non_blocking))

    def trimmed(self) -> "RolloutBatch":
        """The batch without the columns that are padding in every row."""
        width = self.response_mask.shape[1]
        prompt_width = self.input_ids.shape[1] - width
        left = prompt_width - int(self.attention_mask[:, :prompt_width].sum(-1).max()) if len(self) else 0
        right = max(int(self.response_lengths.max()), 1) if len(self) else 1
        if left == 0 and right == width:
            return self
        token_fields = {
            f.name: v[:, :right]
            for f in fields(self)
            if isinstance(v := getattr(self, f.name), Tensor) and v.ndim == 2 and v.shape[1] == width and width > 1
        }
        token_fields["input_ids"] = self.input_ids[:, left : prompt_width + right]
        token_fields["attention_mask"] = self.attention_mask[:, left : prompt_width + right]
        return replace(self, **token_fields)
