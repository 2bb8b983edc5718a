"""Sampling by vLLM's engine in this process."""

import importlib.util
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlalign.models.merged import merged_weights
from rlalign.models.policy import Policy, locate_model
from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.vllm.base import NEEDS_EXTRA, VLLM, Dtype, check_names
from rlalign.rollouts.sampling.vllm.fields import check_lengths, completion, sampling_fields


class VLLMSampler(VLLM):
    """Draws by vLLM's engine in this process, on the device of the policy.

    *Weights* go from the policy into the engine one by one, without a disk, before every iteration and validation;
    LoRA's are merged into copies, one at a time. The cache of prompts is emptied.

    *Draws.* Each response has a generator of its own, seeded by (request seed, prompt, sample), so it depends neither
    on what else is in the batch nor on the rank, but for rounding: vLLM's kernels round by the shape of the batch. In
    float32 that changes a token about as rarely as it does for
    :class:`~rlalign.rollouts.sampling.local.LocalSampler`; in bfloat16 it is common. The tokens are not those of the
    local sampler, which draws by other numbers.

    *Log-probabilities* are of the full distribution at the temperature, before top-k, top-p and min-p. In bfloat16
    they differ from the policy's: correct for that by ``importance_cap``.

    *Memory.* While the policy learns, the engine sleeps on a GPU: its weights and its cache are given back. On a CPU,
    where vLLM cannot sleep, the cache is given back and the copy of the weights stays.

    *One process only*: with several ranks each can have a server, see
    :class:`~rlalign.rollouts.sampling.vllm.server.VLLMServerSampler`.

    Args:
        dtype: In which vLLM computes; by default that of the policy's stored weights.
        max_rows: Responses in flight at once.
        cache_gb: Memory for keys and values, in GiB.
        engine: Further arguments of vLLM's engine: ``{max_model_len: 4096}``, say.
    """

    def __init__(
        self,
        dtype: Dtype = "auto",
        max_rows: int = 256,
        cache_gb: float = 4.0,
        engine: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, max_rows, cache_gb, engine or {})
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(NEEDS_EXTRA.format("VLLMSampler"))
        self.llm: Any = None
        """vLLM's engine, from the first sync on."""
        self._asleep = self._can_sleep = False

    def sync(self, policy: Policy) -> None:
        """Take over the weights of the policy as it is now."""
        self._take_ends(policy)
        self._check_same(policy)
        with policy.whole() as model, _undisturbed():
            if self.llm is None:
                self.llm = self._start(policy)
                self._can_sleep = self.llm.collective_rpc("rlalign_facts")[0]["can_sleep"]
            elif self._asleep:
                self._wake()
            self._synced = False
            self.llm.collective_rpc("rlalign_load", args=(merged_weights(model),))
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM could not empty its cache of prompts.")
        self._synced = True

    def _start(self, policy: Policy) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("VLLMSampler is for one process: with several ranks use VLLMServerSampler.")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is to see the policy's tensors
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        check_names(self.engine, EngineArgs.__dataclass_fields__)
        # vLLM makes a group of one process, and Lightning then wants every metric to be reduced over ranks.
        warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True")
        return LLM(
            locate_model(policy.config.model),
            worker_extension_cls="rlalign.rollouts.sampling.vllm.worker.PolicyWorker",
            disable_log_stats=True,
            **self._arguments(policy),
        )

    def _wake(self) -> None:
        self.llm.wake_up() if self._can_sleep else self.llm.collective_rpc("rlalign_restore_cache")
        self._asleep = False

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order."""
        self._check_synced()
        if not requests:
            return []
        from vllm import SamplingParams as Fields

        check_lengths(requests, params, self.llm.llm_engine.model_config.max_model_len)
        fields = [Fields(**sampling_fields(r, params, self.end_ids, self.tokenizer)) for r in requests]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        with _undisturbed():
            self.llm.collective_rpc("rlalign_temper", args=(params.temperature or 1.0,))
            results = [result.outputs[0] for result in self.llm.generate(prompts, fields, use_tqdm=False)]
        drawn = []
        try:
            for result in results:
                ids = result.token_ids
                logprobs = [at[token].logprob for at, token in zip(result.logprobs, ids, strict=True)]
                drawn.append(completion(ids, logprobs, result.finish_reason, self.end_ids))
        except FloatingPointError:
            self.release()  # NaN in the cache would outlive the weights: a probability of 0 times NaN is NaN
            raise
        return drawn

    def release(self) -> None:
        """Give back the engine's memory on a GPU, and on a CPU that of its cache."""
        if self.llm is None or self._asleep:
            return
        self.llm.sleep(level=2) if self._can_sleep else self.llm.collective_rpc("rlalign_drop_cache")
        self._asleep, self._synced = True, False


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the process as it was: vLLM seeds all generators, and on a CPU replaces ``torch.set_num_threads``."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)
