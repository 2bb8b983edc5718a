"""The one container that rollouts travel in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlalign.rewards.base import Response


@dataclass(slots=True)
class RolloutBatch:
    """Padded rollouts; row ``b`` is one response, and the samples of one prompt are adjacent.

    ``B`` rollouts, ``P`` prompt tokens (left-padded), ``T`` response tokens (right-padded). Log-probabilities are in
    nats, float32, and of the full distribution at ``temperature``. Fields that start as ``None`` are filled by whoever
    needs them.
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
    """What the rewards add up to, ``[B]``, float32; 0 where not ``valid``."""
    valid: Tensor
    """False where a reward could not be computed: the row takes no part in statistics or loss, ``[B]``."""
    correct: Tensor
    """True where the reward that tells right from wrong says right, ``[B]``."""
    kept: Tensor
    """False on the rows of groups that were turned down and only fill up the iteration, ``[B]``."""
    components: dict[str, Tensor] = field(default_factory=dict)
    """Each reward by name as it was computed, ``[B]``, NaN where it was not."""
    sampler_logprobs: Tensor | None = None
    """Of the response tokens, as the sampler computed them, ``[B, T]``."""
    old_logprobs: Tensor | None = None
    """The same under the policy before the iteration's first step, ``[B, T]``; ``None`` if that is the current one."""
    ref_logprobs: Tensor | None = None
    """Of the response tokens under the frozen reference, ``[B, T]``."""
    advantages: Tensor | None = None
    """``[B, 1]`` a response or ``[B, T]`` a token."""
    values: Tensor | None = None
    """Predicted return from the state before each response token, before the iteration's first step, ``[B, T]``."""
    returns: Tensor | None = None
    """What the value of that state is to become, ``[B, T]``."""
    replayed: Tensor | None = None
    """True on the rows that an earlier policy sampled, ``[B]``; ``None`` if there is none."""
    temperature: float = 1.0
    """Of the distribution that was sampled; every log-probability is of this distribution."""
    step_tokens: float = 0.0
    """Tokens in ``loss_mask`` of the whole optimizer step, over all minibatches and ranks."""
    step_replayed_tokens: float = 0.0
    """Those of them that are replayed."""
    step_sequences: float = 0.0
    """Rows with at least one such token in the whole optimizer step."""
    statistics: dict[str, float] = field(default_factory=dict)
    """Of the whole iteration, to be logged; on its first minibatch only."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def response_lengths(self) -> Tensor:
        """Response tokens of each row, ``[B]``."""
        return self.response_mask.sum(-1)

    @property
    def prompt_lengths(self) -> Tensor:
        """Prompt tokens of each row, ``[B]``."""
        return self.attention_mask.sum(-1) - self.response_lengths

    @property
    def fresh_mask(self) -> Tensor:
        """``loss_mask`` without the rows that are replayed, ``[B, T]``."""
        return self.loss_mask if self.replayed is None else self.loss_mask & ~self.replayed.unsqueeze(1)

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
        token_fields: dict[str, Any] = {
            f.name: v[:, :right]
            for f in fields(self)
            if isinstance(v := getattr(self, f.name), Tensor) and v.ndim == 2 and v.shape[1] == width and width > 1
        }
        token_fields["input_ids"] = self.input_ids[:, left : prompt_width + right]
        token_fields["attention_mask"] = self.attention_mask[:, left : prompt_width + right]
        return replace(self, **token_fields)

    def has_signal(self, rows_together: int = 1) -> Tensor:
        """Rows with an advantage other than 0 on a token that counts, and those kept together with them, ``[B]``."""
        assert self.advantages is not None
        rows = ((self.advantages != 0) & self.loss_mask).any(1)
        return rows.view(-1, rows_together).any(1).repeat_interleave(rows_together)

    def emptied(self, rows: int = 1) -> "RolloutBatch":
        """Rows of one response token that the loss does not count: a minibatch for a rank without data."""
        row = self[:rows]
        row.response_mask = torch.zeros_like(row.response_mask)
        row.response_mask[:, 0] = True
        row.loss_mask = torch.zeros_like(row.loss_mask)
        return row.trimmed()


@dataclass(slots=True)
class Rollout:
    """One response and all that is known of it before it is put into a batch."""

    prompt_index: int
    sample_index: int
    prompt_ids: Tensor
    """``[p]``, int32."""
    token_ids: Tensor
    """``[t]``, int32, the end token included."""
    logprobs: Tensor
    """``[t]``, float32, under the sampler."""
    truncated: bool
    text: str
    prefill: str
    """What the prompt had already put into the mouth of the assistant."""
    reward: float | None
    """What the rewards add up to; ``None`` where one could not be computed."""
    correct: bool
    components: dict[str, float | None]
    """Each reward by name, as it was computed."""
    unavailable: bool = False
    """Whether it could not be judged because what judges could not be reached."""
    verified: bool | None = None
    """Whether a second verifier calls it right; ``None`` if there is none, or it could not tell."""
    score: float | None = None
    """What ranks candidates says of it, higher is better; ``None`` if nothing does, or it could not."""
    version: int = 0
    """Of the weights that sampled it, where the sampler counts them."""

    @property
    def response(self) -> Response:
        """The text, as rewards take it."""
        ids = self.token_ids.tolist()
        return Response(self.text, len(ids), self.truncated, self.prefill, ids)


def _pad(rows: list[Tensor], fill: float, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def collate(rollouts: Sequence[Rollout], pad_id: int, temperature: float) -> RolloutBatch:
    """Pad rollouts into one batch; the order is kept.

    Masks come from recorded lengths and finish reasons, never from token ids: a padding id may also be an end token.
    """
    prompt_lengths = torch.tensor([len(r.prompt_ids) for r in rollouts])
    lengths = torch.tensor([len(r.token_ids) for r in rollouts])
    prompt_width, width = int(prompt_lengths.max()), int(lengths.max())
    prompts = _pad([r.prompt_ids for r in rollouts], pad_id, side="left")
    responses = _pad([r.token_ids for r in rollouts], pad_id)
    response_mask = torch.arange(width) < lengths.unsqueeze(1)
    prompt_mask = torch.arange(prompt_width) >= (prompt_width - prompt_lengths).unsqueeze(1)
    valid = torch.tensor([r.reward is not None for r in rollouts])
    return RolloutBatch(
        input_ids=torch.cat([prompts, responses], 1).long(),
        attention_mask=torch.cat([prompt_mask, response_mask], 1),
        response_mask=response_mask,
        loss_mask=response_mask & valid.unsqueeze(1),
        prompt_index=torch.tensor([r.prompt_index for r in rollouts]),
        sample_index=torch.tensor([r.sample_index for r in rollouts]),
        truncated=torch.tensor([r.truncated for r in rollouts]),
        rewards=torch.tensor([r.reward or 0.0 for r in rollouts], dtype=torch.float32),
        valid=valid,
        correct=torch.tensor([r.correct for r in rollouts]),
        kept=torch.ones(len(rollouts), dtype=torch.bool),
        components={
            name: torch.tensor(
                [float("nan") if (v := r.components[name]) is None else v for r in rollouts], dtype=torch.float32
            )
            for name in rollouts[0].components
        },
        sampler_logprobs=_pad([r.logprobs for r in rollouts], 0.0),
        temperature=temperature,
    )
