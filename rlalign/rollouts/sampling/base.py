"""What a sampler takes and gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["eos", "stop", "length"]


@dataclass
class SamplingParams:
    """How responses are drawn; nothing is inherited from a checkpoint's ``generation_config``."""

    max_new_tokens: int = 256
    """Longest response, in tokens, the end token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """A response ends with the token that completes one of these strings."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 keeps every token.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (keep all) or more, got {self.top_k}.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}.")
        if any(not s for s in self.stop):
            raise ValueError("stop strings must not be empty.")

    def changed(self, changes: dict[str, Any]) -> "SamplingParams":
        """A copy with some of them changed.

        Raises:
            ValueError: If a name is unknown; the message has the known ones.
        """
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"There is no sampling parameter '{name}': they are {', '.join(known)}.")
        return replace(self, **changes)


@dataclass(frozen=True)
class SampleRequest:
    """One response to draw; its random numbers are a function of the seed (of run and iteration) and the indices."""

    prompt_ids: tuple[int, ...]
    prompt_index: int
    sample_index: int
    seed: int


@dataclass
class Completion:
    """One response."""

    token_ids: list[int]
    """With the end token, if there is one."""
    logprobs: list[float]
    """Of each token under the full distribution at the sampling temperature (at 1 when greedy), in nats."""
    finish_reason: FinishReason
    version: int = 0
    """Of the weights that drew it, where the sampler counts them: see :class:`AheadSampler`."""


class Sampler(Protocol):
    """Draws responses from a policy."""

    def setup(self, tokenizer: Any) -> None:
        """Take the tokenizer of the policy; called before anything else."""

    def sync(self, policy: Any) -> None:
        """Take over the weights of the policy as it is now; called before every iteration and validation."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; requests of one prompt are adjacent."""

    def is_approximate(self, dtype: Any) -> bool:
        """Whether it draws from what differs from a policy that computes in this type by more than rounding."""

    def release(self) -> None:
        """Give back what training has more use for; called when an iteration or validation has sampled."""


class Drawing(Protocol):
    """Responses that are being drawn."""

    def result(self) -> list[Completion]:
        """One completion for each request, in order; waits until they are there."""

    def cancel(self) -> None:
        """Do not begin with what has not begun."""


@runtime_checkable
class AheadSampler(Sampler, Protocol):
    """A sampler that draws while the policy learns.

    Every :meth:`sync` with other weights than before gives them a new version, counted from 1.
    """

    staleness: int
    """Most iterations that are drawn beside the one that is waited for; 0 draws one when it is its turn."""
    version: int
    """Of the newest weights."""
    num_replaced: int
    """Workers replaced so far."""
    num_workers: int
    """That draw at once."""
    busy_seconds: float
    """In which workers drew so far, a sum over them."""
    broadcast_seconds: float
    """What the last sync took."""

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Drawing:
        """Begin to draw, with the newest weights that there are when a request's turn comes."""
