"""Who says which of several responses to one prompt is the better one."""

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlalign.data.files import read_rows
from rlalign.functional.reductions import masked_mean
from rlalign.models.scalar import ScalarModel, at_last_token
from rlalign.rollouts.batch import Rollout, RolloutBatch
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.ranks import data_parallel, gather_objects


class Annotator(ABC):
    """Scores responses, to compare those of one prompt with each other."""

    @abstractmethod
    def __call__(self, rollouts: RolloutBatch, group_size: int, data: RolloutDataModule) -> Tensor:
        """The score of each response, ``[B]``, NaN where it has none; alike on all ranks.

        Args:
            rollouts: Of the whole iteration, on the CPU of every rank.
            group_size: Responses a prompt, adjacent ones.
            data: What sampled them.
        """


class RewardAnnotator(Annotator):
    """The rewards of the data module: a verifier, a learned reward, a judge, whatever they are."""

    def __call__(self, rollouts: RolloutBatch, group_size: int, data: RolloutDataModule) -> Tensor:
        """The rewards, ``[B]``, NaN where one could not be computed."""
        return rollouts.rewards.masked_fill(~rollouts.valid, float("nan"))


class SelfAnnotator(Annotator):
    """The policy judges its own responses, without any reward.

    Args:
        by: ``agreement`` scores a response by the share of the prompt's responses that give its answer
            (self-consistency, Wang et al. 2022, https://arxiv.org/abs/2203.11171); one without an answer has no score.
            ``likelihood`` takes the mean log-probability (nats a token) of the response, as it was sampled: that
            rewards what the policy does anyway, and sharpens it.
    """

    def __init__(self, by: Literal["agreement", "likelihood"] = "agreement") -> None:
        if by not in ("agreement", "likelihood"):
            raise ValueError(f"by must be 'agreement' or 'likelihood', got {by!r}.")
        self.by = by

    def __call__(self, rollouts: RolloutBatch, group_size: int, data: RolloutDataModule) -> Tensor:
        """Shares of the group's votes, or nats a token, ``[B]``."""
        if self.by == "likelihood":
            assert rollouts.sampler_logprobs is not None
            return masked_mean(rollouts.sampler_logprobs, rollouts.response_mask, dim=1)
        answers = data.rewards.answers([r.response for r in rollouts_of(rollouts, data)])
        scores = []
        for start in range(0, len(answers), group_size):
            group = answers[start : start + group_size]
            scores += [float("nan") if answer is None else group.count(answer) / group_size for answer in group]
        return torch.tensor(scores)


class ValueAnnotator(Annotator):
    """A value function: what a classifier with one label gives the last token of prompt and response.

    Args:
        model: Folder or hub name of the classifier, one that :class:`~rlalign.algorithms.value_response.ValueResponse`
            or a reward model was exported to.
        batch_size: Responses a forward pass.
        trust_remote_code: Run model code that comes with the weights.
    """

    def __init__(self, model: str, batch_size: int = 64, trust_remote_code: bool = False) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.model, self.batch_size, self.trust_remote_code = model, batch_size, trust_remote_code
        self._value: ScalarModel | None = None

    @torch.no_grad()
    def __call__(self, rollouts: RolloutBatch, group_size: int, data: RolloutDataModule) -> Tensor:
        """Values, ``[B]``; each rank computes its share."""
        assert data.trainer is not None
        device = data.trainer.strategy.root_device
        if self._value is None:
            self._value = ScalarModel(self.model, trust_remote_code=self.trust_remote_code).train(False)
        value = self._value.to(device)
        rank, num_ranks = data_parallel(data.trainer)
        mine = rollouts.response_lengths.argsort(stable=True)[rank::num_ranks]
        scored = []
        for rows in mine.split(self.batch_size):
            batch = rollouts[rows].trimmed().to(device)
            scored.append((rows, at_last_token(value(batch.input_ids, batch.attention_mask), batch.attention_mask)))
        values = torch.zeros(len(rollouts), dtype=torch.float32)
        for of_rank in gather_objects([(rows, found.float().cpu()) for rows, found in scored]):
            for rows, found in of_rank:
                values[rows] = found
        return values


class FileAnnotator(Annotator):
    """Human choices from a file. A response scores the comparisons that it won, less those that it lost.

    Responses that are not in the file have no score. A row is one choice, ``{"prompt": ..., "preferred": ...,
    "other": ...}``, or an order, ``{"prompt": ..., "responses": [...], "ranks": [...]}`` with 1 for the best, which
    counts as a comparison of every two with different ranks. Prompts are those of the data's column (text or
    messages), responses are compared by their text without blanks around it.

    Args:
        path: A JSONL file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a row is malformed; the message names it.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).expanduser().is_file():
            raise FileNotFoundError(f"FileAnnotator.path={path}: there is no such file.")
        self.path = path
        self._scores: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for number, row in enumerate(read_rows([Path(path).expanduser()]), 1):
            for better, worse in _choices(row, f"{path}, row {number}"):
                of_prompt = self._scores[_key(row["prompt"])]
                of_prompt[better] += 1
                of_prompt[worse] -= 1

    def __call__(self, rollouts: RolloutBatch, group_size: int, data: RolloutDataModule) -> Tensor:
        """Comparisons won less those lost, ``[B]``, NaN for a response that the file does not have."""
        assert data.train_prompts is not None
        scores = []
        for rollout in rollouts_of(rollouts, data):
            prompt = _key(data.train_prompts[rollout.prompt_index].example["prompt"])
            scores.append(self._scores.get(prompt, {}).get(rollout.text.strip(), float("nan")))
        return torch.tensor(scores)


def rollouts_of(batch: RolloutBatch, data: RolloutDataModule) -> list[Rollout]:
    """What is known of each row of the iteration just sampled."""
    known = {(r.prompt_index, r.sample_index): r for r in data.last_rollouts}
    return [known[key] for key in zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True)]


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _choices(row: dict[str, Any], where: str) -> list[tuple[str, str]]:
    """The comparisons that a row of the file makes, each the better response and the other."""
    if not row.get("prompt"):
        raise ValueError(f"{where} has no prompt.")
    texts, ranks = row.get("responses"), row.get("ranks")
    if texts is None:
        texts, ranks = [row.get("preferred"), row.get("other")], [1, 2]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} must have the texts 'preferred' and 'other', or a list of texts 'responses'.")
    if not isinstance(ranks, list) or len(ranks) != len(texts) or not all(isinstance(r, int | float) for r in ranks):
        raise ValueError(f"{where} must have a number in 'ranks' for each of its {len(texts)} responses, 1 the best.")
    ordered = sorted(zip(ranks, (text.strip() for text in texts), strict=True))
    return [(a, b) for i, (rank, a) in enumerate(ordered) for other, b in ordered[i + 1 :] if rank < other and a != b]
