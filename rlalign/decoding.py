"""Several responses to a prompt, and one of them chosen: by the vote of a majority, or by what a scorer says."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlalign.functional.draws import fold_in
from rlalign.models.policy import Policy, PolicyConfig, locate_model
from rlalign.rewards.base import NamedReward, Response
from rlalign.rewards.suite import RewardSuite
from rlalign.rollouts.prompts import Prompt
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.scoring import responses_of
from rlalign.rollouts.template import Rendering, render_prompt


@dataclass(frozen=True)
class Candidate:
    """One response among those to choose from."""

    text: str
    score: float | None
    """What chooses says of it: the scorer's number, or how many candidates answer the same; ``None`` if it cannot."""
    num_tokens: int
    """Tokens generated, the end token included."""
    truncated: bool
    """Whether the length limit cut it."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a prompt, and from what."""

    candidates: list[Candidate]
    index: int
    """Of the chosen candidate."""

    @property
    def text(self) -> str:
        """The chosen response."""
        return self.candidates[self.index].text


def best_of_n(
    policy: str | Policy,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    n: int = 8,
    scorer: Literal["majority"] | NamedReward | Callable[..., Any] = "majority",
    params: SamplingParams = SamplingParams(),  # noqa: B008  (never changed)
    read_answer: Callable[[Response], Hashable] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    system_prompt: str | None = None,
    rendering: Rendering = "auto",
    seed: int = 0,
) -> list[Choice]:
    """Sample ``n`` responses to each prompt and choose the best.

    Sources: by a learned verifier, Cobbe et al. 2021 (https://arxiv.org/abs/2110.14168); by the vote of the majority,
    Wang et al. 2023 (https://arxiv.org/abs/2203.11171).

    Args:
        policy: A folder that ``rlalign export`` or ``save_pretrained`` wrote, a name on the Hugging Face hub,
            ``embedded``, or a policy in memory, which stays on its device; what is loaded goes to the GPU where there
            is one.
        prompts: Texts or messages, ``[P]``; rendered by the chat template where there is one.
        n: Responses a prompt.
        scorer: ``majority``, or any reward, such as a :class:`~rlalign.rewards.learned.LearnedReward`: the example that
            it gets has the ``prompt`` alone. The highest score wins; the first of equals does; a response that it
            cannot score does where it can score none.
        params: How responses are drawn.
        read_answer: What a response answers, for the majority: the ``answer`` method of a reward, such as
            ``MathReward().answer``; ``None`` has no vote. By default all of the text. Of answers with equally many
            votes, the one that came first wins.
        tokenizer: Of the policy; by default the one in its folder.
        system_prompt: Put before every prompt.
        rendering: How a prompt that is plain text is shown: see :func:`~rlalign.rollouts.template.render_prompt`.
        seed: With the numbers of prompt and response, what the random numbers are a function of: the first 4 responses
            of 8 are those of ``n=4``.

    Returns:
        A choice for each prompt, ``[P]``, with all of its candidates.

    Raises:
        ValueError: If ``n`` is below 1, ``read_answer`` is given to a scorer, or a prompt cannot be rendered or leaves
            no room for a response; if the scorer can score nothing.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    if scorer != "majority" and isinstance(scorer, str):
        raise ValueError(f"scorer must be 'majority' or a reward, got '{scorer}'.")
    if scorer != "majority" and read_answer is not None:
        raise ValueError("read_answer is for scorer='majority'; a scorer reads responses by itself.")
    if isinstance(policy, str):
        policy = Policy(PolicyConfig(policy)).to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(
        locate_model(policy.config.model), trust_remote_code=policy.config.trust_remote_code
    )
    rendered = [
        Prompt(i, tuple(ids), {"prompt": prompt}, prefill)
        for i, prompt in enumerate(prompts)
        for ids, prefill in [render_prompt(tokenizer, prompt, system_prompt, rendering)]
    ]
    _check_room(rendered, policy, params)
    asked = [prompt for prompt in rendered for _ in range(n)]
    responses = _responses(policy, tokenizer, asked, n, params, seed)
    if isinstance(scorer, str):
        read = read_answer or (lambda response: response.strip() or None)
        answers = [read(response) for response in responses]
        scores: list[float | None] = [v for i in range(0, len(answers), n) for v in votes(answers[i : i + n])]
    else:
        scores = RewardSuite({"scorer": scorer})([p.example for p in asked], responses).components["scorer"]
        if scores and all(score is None for score in scores):
            raise ValueError(
                f"The scorer could score none of the {len(scores)} responses: it gets the prompt alone, and no answer."
            )
    candidates = [Candidate(str(r), s, r.num_tokens, r.truncated) for r, s in zip(responses, scores, strict=True)]
    groups = [candidates[i : i + n] for i in range(0, len(candidates), n)]
    return [Choice(group, first_best([candidate.score for candidate in group])) for group in groups]


def _check_room(prompts: Sequence[Prompt], policy: Policy, params: SamplingParams) -> None:
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    for prompt in prompts:
        if positions is not None and len(prompt.ids) + params.max_new_tokens > positions:
            raise ValueError(
                f"Prompt {prompt.index} has {len(prompt.ids)} tokens: with max_new_tokens={params.max_new_tokens} that "
                f"is more than the {positions} positions of the model."
            )


def _responses(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Prompt],
    n: int,
    params: SamplingParams,
    seed: int,
) -> list[Response]:
    sampler = LocalSampler()
    sampler.setup(tokenizer)
    sampler.sync(policy)
    key = fold_in(seed)
    requests = [SampleRequest(prompt.ids, prompt.index, i % n, key) for i, prompt in enumerate(asked)]
    return responses_of(asked, sampler.sample(requests, params), tokenizer)


def votes(answers: Sequence[Hashable]) -> list[float]:
    """How many of the answers to one prompt are the same as each, ``[n]``; 0 for ``None``, which is no answer."""
    counts = Counter(answer for answer in answers if answer is not None)
    return [float(counts[answer]) for answer in answers]


def first_best(scores: Sequence[float | None]) -> int:
    """Where the highest score is, the first of equals; ``None`` and NaN are below every number."""
    known = [-math.inf if score is None or math.isnan(score) else score for score in scores]
    return known.index(max(known))
