"""Sampling from a server of vLLM."""

import importlib.util
import os
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlalign.models.merged import merged_weights
from rlalign.models.policy import Policy, locate_model
from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.vllm.base import NEEDS_EXTRA, VLLM, Dtype
from rlalign.rollouts.sampling.vllm.connection import Connection
from rlalign.rollouts.sampling.vllm.fields import check_lengths, completion, sampling_fields
from rlalign.rollouts.sampling.vllm.process import ServerProcess


class VLLMServerSampler(VLLM):
    """Draws by a server of vLLM, which it starts itself or which runs somewhere.

    What :class:`~rlalign.rollouts.sampling.vllm.engine.VLLMSampler` says of draws and log-probabilities holds here. A
    server has a process of its own, and may have an environment and a device of its own. Token ids go in, and token ids
    with log-probabilities come out, by OpenAI's completions protocol with vLLM's additions.

    *Weights* go as messages, without a disk; LoRA's are merged into copies, one at a time. vLLM has faster ways (NCCL,
    IPC), which need GPUs and are not used.

    *Life.* A server that is started here listens on a socket that only this user can reach. It is ended when the
    sampler is gone, or this process, even by a kill; a new one starts at the next sync if it has died.

    *Memory.* While the policy learns, a server that was started with a GPU sleeps; on a CPU its cache is given back.

    Each rank has a server of its own. With ``url`` there must be one rank only.

    Args:
        url: Of a server that runs, started as docs/vllm.md says, and that nobody else samples from.
        python: Interpreter that has vLLM, to start a server by; by default this one.
        dtype: In which vLLM computes; by default that of the policy's stored weights.
        max_rows: Responses in flight at once.
        cache_gb: Memory for keys and values, in GiB.
        engine: Further arguments of ``vllm serve``: ``{tensor_parallel_size: 2}``, say.
        start_seconds: How long a server may take to start.
        api_key_env: Name of the environment variable with the key of the server at ``url``.
    """

    def __init__(
        self,
        url: str | None = None,
        python: str | None = None,
        dtype: Dtype = "auto",
        max_rows: int = 256,
        cache_gb: float = 4.0,
        engine: dict[str, Any] | None = None,
        start_seconds: float = 600.0,
        api_key_env: str | None = None,
    ) -> None:
        super().__init__(dtype, max_rows, cache_gb, engine or {})
        if url is not None and (python is not None or engine):
            raise ValueError("python and engine are of a server that is started here: leave them out, or url.")
        if url is None and api_key_env is not None:
            raise ValueError("api_key_env is of a server at url: give url, or leave it out.")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url} must begin with http:// or https://.")
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(f"api_key_env={api_key_env}: there is no such environment variable.")
        if url is None and python is None and importlib.util.find_spec("vllm") is None:
            raise ImportError(NEEDS_EXTRA.format("VLLMServerSampler") + " Or give url or python of one that has it.")
        self.url, self.python, self.start_seconds = url, python or sys.executable, start_seconds
        self.server: ServerProcess | None = None
        """The one that was started here."""
        self._connection: Connection | None = None
        self._key = None if api_key_env is None else os.environ[api_key_env]
        self._asleep = False

    def sync(self, policy: Policy) -> None:
        """Take over the weights of the policy as it is now."""
        self._take_ends(policy)
        self._check_same(policy)
        self._synced = False
        connection = self._connect(policy)
        if self._asleep:
            self._wake(connection)
        with policy.whole() as model:
            connection.send(merged_weights(model), self._dtype(policy))
        if not connection.call("POST", "/reset_prefix_cache")["success"]:
            raise RuntimeError("vLLM's server could not empty its cache of prompts: does someone else sample from it?")
        self._synced = True

    def _connect(self, policy: Policy) -> Connection:
        """The connection to a server that is alive."""
        if self.server is not None and self.server.process.poll() is not None:
            self.close()
        if self._connection is not None:
            return self._connection
        address = self.url
        if address is None:
            self.server = ServerProcess(
                locate_model(policy.config.model),
                self.python,
                self._arguments(policy),
                policy.model.device,
                self.start_seconds,
            )
            self._finalizer = weakref.finalize(self, self.server.stop)  # at the latest when the interpreter exits
            address = str(self.server.socket)
        elif torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError("url is for one rank: with several, leave it out, and each starts a server.")
        connection = Connection(address, self._key)
        self._facts = _facts(connection)
        (model,) = connection.call("GET", "/v1/models")["data"][:1]
        self._model, self._positions = model["id"], model["max_model_len"]
        self._connection = connection
        return connection

    def _wake(self, connection: Connection) -> None:
        if self._facts["can_sleep"]:
            connection.call("POST", "/wake_up")
        else:
            connection.rpc("rlalign_restore_cache")
        self._asleep = False

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order."""
        self._check_synced()
        if not requests:
            return []
        check_lengths(requests, params, self._positions)
        connection = self._connection
        assert connection is not None
        connection.rpc("rlalign_temper", params.temperature or 1.0)

        def draw(request: SampleRequest) -> Completion:
            fields = sampling_fields(request, params, self.end_ids, self.tokenizer)
            body = {"model": self._model, "prompt": list(request.prompt_ids), "return_token_ids": True, **fields}
            (choice,) = connection.call("POST", "/v1/completions", body)["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            return completion(choice["token_ids"], logprobs, choice["finish_reason"], self.end_ids)

        try:
            with ThreadPoolExecutor(min(len(requests), self.max_rows)) as pool:
                return list(pool.map(draw, requests))
        except (FloatingPointError, RuntimeError):
            # NaN in the cache would outlive the weights, and the server does not say more than that it failed.
            if self.server is None or self.server.process.poll() is None:
                self.release()
            raise

    def release(self) -> None:
        """Give back memory: that of the weights and the cache on a GPU, and on a CPU that of the cache."""
        if self._connection is None or self._asleep:
            return
        if self._facts["can_sleep"]:
            self._connection.call("POST", "/sleep?level=2")
        else:
            self._connection.rpc("rlalign_drop_cache")
        self._asleep, self._synced = True, False

    def close(self) -> None:
        """End the server, if it was started here."""
        self._connection, self._synced, self._asleep = None, False, False
        if self.server is not None:
            self._finalizer()
            self.server = None


def _facts(connection: Connection) -> dict[str, Any]:
    """What the server says of itself.

    Raises:
        RuntimeError: If it was not started in a way that serves.
    """
    try:
        facts: dict[str, Any] = connection.rpc("rlalign_facts")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"The server at {connection.address} takes no weights: start it as docs/vllm.md says. ({error})"
        ) from error
    if facts["logprobs_mode"] != "raw_logprobs":
        raise RuntimeError(f"The server must have --logprobs-mode raw_logprobs, not {facts['logprobs_mode']}.")
    if facts["keeps_packed_weights"]:
        raise RuntimeError("On a CPU the server must have --enforce-eager, else it goes on with the old weights.")
    return facts
