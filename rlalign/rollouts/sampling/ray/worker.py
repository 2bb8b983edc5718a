"""What runs in the process of a worker."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import Completion, Sampler, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.ray.weights import take_weights
from rlalign.rollouts.worker_memory import WorkerMemory


class SamplingWorker:
    """A replica of the policy with a sampler that draws from it, and what workers of a method remember.

    Args:
        config: Of the policy; its files must be where this process can read them.
        tokenizer: Of the policy.
        sampler: That draws here.
        parameters: Actor that knows the newest weights.
        threads: Of the CPU to compute with.
    """

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        parameters: Any,
        threads: int,
    ) -> None:
        self.threads = threads
        self.device = "cuda" if torch.cuda.is_available() else "cpu"  # Ray shows a worker the GPUs that it was given
        self.policy = Policy(config).to(self.device)
        self.sampler, self.parameters = sampler, parameters
        self.sampler.setup(tokenizer)
        self.version, self._is_synced = 0, False
        self._memories: dict[int, WorkerMemory] = {}

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, autocast: torch.dtype | None, version: int
    ) -> tuple[list[Completion], float, float]:
        """Completions, the seconds that it took to take over newer weights, and those to draw.

        Args:
            requests: What to draw.
            params: How.
            autocast: Type in which the run computes, where that is not the type of its weights.
            version: Of weights that there are; there may be newer ones by now.
        """
        began = time.perf_counter()
        torch.set_num_threads(self.threads)  # of this thread, which is not the one that made the worker
        self._sync(version)
        synced = time.perf_counter()
        context: Any = nullcontext() if autocast is None else torch.autocast(self.device, autocast)
        with context:
            drawn = self.sampler.sample(requests, params)
        return [replace(c, version=self.version) for c in drawn], synced - began, time.perf_counter() - synced

    def _sync(self, version: int) -> None:
        if self.version < version:
            import ray

            self.version, (held,) = ray.get(self.parameters.newest.remote())
            take_weights(self.policy, ray.get(held))
            self._is_synced = False
        if not self._is_synced:
            self.sampler.sync(self.policy)
            self._is_synced = True

    def release(self) -> None:
        """Have the sampler give back memory while the policy learns."""
        self.sampler.release()
        self._is_synced = False

    # ---- what workers remember ---------------------------------------------------------------------------------------

    def remember(self, number: int, capacity: int, update: float, *call: Any) -> Any:
        """Call a method of a memory that is kept here, and is made if it is not there.

        Args:
            number: Of the memory.
            capacity: See :class:`~rlalign.rollouts.worker_memory.WorkerMemory`.
            update: The same.
            call: Name of the method, and its arguments.
        """
        if number not in self._memories:
            self._memories[number] = WorkerMemory(capacity, update)
        method, *arguments = call
        return getattr(self._memories[number], method)(*arguments)
