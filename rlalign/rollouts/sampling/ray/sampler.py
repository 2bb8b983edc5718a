"""Sampling by workers on a Ray cluster: the side of the run."""

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlalign.models.policy import Policy
from rlalign.rollouts.ranks import broadcast_object
from rlalign.rollouts.sampling.base import Completion, Sampler, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.sampling.ray.cluster import NAMESPACE, check_installed, connect, rank_and_size
from rlalign.rollouts.sampling.ray.crew import Crew, Item, RayDrawing
from rlalign.rollouts.sampling.ray.memory import RemoteMemory
from rlalign.rollouts.sampling.ray.weights import Parameters, Weights, gather_weights


class RaySampler:
    """Draws by workers in processes of their own, on this machine or on others.

    *Workers.* Each has a replica of the policy and a sampler that draws from it. An iteration is cut into items of
    whole prompts, which are handed out one at a time. A worker that dies is replaced, and its item is handed out again:
    an item counts once, when the first answer to it has come.

    *Weights.* Those that differ from the checkpoint's (with LoRA the adapter's only) go into Ray's object store once
    for every version, and one actor knows which are the newest: workers read them from the store, which copies them to
    each machine once. Weights that have not changed are not sent again.

    *How far ahead.* With ``staleness`` 0 workers draw an iteration when it is due, and the run is the one that
    :class:`~rlalign.rollouts.sampling.local.LocalSampler` makes, but for rounding. With 1 they draw the next iteration
    while the policy learns from this one, with more, up to so many; they wait when so many are drawn. A response is
    drawn with the newest weights that there are when its turn comes, at most so many versions old; which prompts an
    iteration has, and by which random numbers, does not depend on the workers' speed. Correct for it by
    ``importance_cap``.

    *Several ranks.* All are part of one cluster. Each has ``num_workers`` workers of its own, which draw its share; the
    weights go from rank 0 to all of them. Gradients are the trainer's affair (DDP's ring).

    Args:
        num_workers: On each rank.
        staleness: Most versions that weights are old, 0 or more.
        sampler: That draws in each worker: the local one by default, or one of vLLM's.
        prompts_per_item: Prompts that a worker is handed at a time: fewer share out better, more compute better.
        address: Of a Ray cluster that runs, ``auto`` for that of this machine; by default one is started, or
            the environment variable RAY_ADDRESS has it.
        cpus_per_worker: Of what Ray counts; a whole number above 1 is also the number of threads.
        gpus_per_worker: The same for GPUs: above 0, the worker computes on one.
        object_store_mb: Memory for weights and responses, where a cluster is started; by default Ray's choice.
        environment: Variables of the workers' environment.
        max_deaths: Deaths of one worker in a row, without an item done between them, that end the run.

    Raises:
        ImportError: If Ray is not installed.
        ValueError: If a number is out of bounds.
    """

    def __init__(
        self,
        num_workers: int = 2,
        staleness: int = 0,
        sampler: Sampler | None = None,
        prompts_per_item: int = 1,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        object_store_mb: int | None = None,
        environment: dict[str, str] | None = None,
        max_deaths: int = 3,
    ) -> None:
        check_installed()
        bounds: dict[str, tuple[float, int]] = {
            "num_workers": (num_workers, 1),
            "staleness": (staleness, 0),
            "prompts_per_item": (prompts_per_item, 1),
            "cpus_per_worker": (cpus_per_worker, 0),
            "gpus_per_worker": (gpus_per_worker, 0),
            "max_deaths": (max_deaths, 1),
        }
        for name, (value, least) in bounds.items():
            if value < least:
                raise ValueError(f"RaySampler: {name} must be at least {least}, got {value}.")
        if object_store_mb is not None and object_store_mb < 80:
            raise ValueError(
                f"RaySampler: object_store_mb must be at least 80, Ray's own limit; got {object_store_mb}."
            )
        if object_store_mb is not None and address is not None:
            raise ValueError("RaySampler: object_store_mb is of a cluster that is started: leave out it, or address.")
        self.num_workers, self.staleness, self.prompts_per_item = num_workers, staleness, prompts_per_item
        self.sampler: Sampler = sampler or LocalSampler()
        self.address, self.object_store_mb, self.max_deaths = address, object_store_mb, max_deaths
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, gpus_per_worker
        self.environment = environment or {}
        self.version, self.broadcast_seconds = 0, 0.0
        self.crew: Crew | None = None
        """The workers, from the first sync on."""
        self._parameters: Any = None
        self._published: Weights | None = None
        self._started_cluster = False
        self._started_for: dict[str, Any] | None = None

    def setup(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer, which the workers are given."""
        self.tokenizer = tokenizer

    def is_approximate(self, dtype: torch.dtype) -> bool:
        """Whether it draws from what differs from a policy that computes in this type by more than rounding."""
        return self.staleness > 0 or self.sampler.is_approximate(dtype)

    @property
    def num_replaced(self) -> int:
        """Workers replaced so far."""
        return 0 if self.crew is None else self.crew.num_replaced

    @property
    def busy_seconds(self) -> float:
        """In which workers drew so far, a sum over them."""
        return 0.0 if self.crew is None else self.crew.busy_seconds

    # ---- weights -----------------------------------------------------------------------------------------------------

    def sync(self, policy: Policy) -> None:
        """Have workers draw by the weights of the policy as it is now, from their next item on."""
        if self.crew is not None and self._started_for != asdict(policy.config):
            self.close()
        if self.crew is None:
            self.crew = self._start(policy)
        import ray

        began, is_first = time.perf_counter(), rank_and_size()[0] == 0
        with policy.whole() as model:
            if is_first:
                weights = gather_weights(policy, model)
                if not weights.equals(self._published):
                    self.version += 1
                    reference = ray.put(weights)
                    ray.get(self._parameters.publish.remote(self.version, [reference]))
                    self._published = ray.get(reference)  # where it lies in the store: no copy
        self.version = self.crew.version = broadcast_object(self.version)
        self.broadcast_seconds = time.perf_counter() - began

    def _start(self, policy: Policy) -> Crew:
        needs = (self.num_workers * self.cpus_per_worker, self.num_workers * self.gpus_per_worker)
        started = connect(self.address, *needs, self.object_store_mb)
        import ray

        from rlalign.rollouts.sampling.ray.worker import SamplingWorker

        name = ""
        if rank_and_size()[0] == 0:
            name = f"parameters-{ray.get_runtime_context().get_job_id()}-{id(self)}"
            actor = ray.remote(num_cpus=0)(Parameters)
            self._parameters = actor.options(name=name, namespace=NAMESPACE).remote()
            ray.get(self._parameters.newest.remote())  # it is there before others look for it
        name = broadcast_object(name)
        if self._parameters is None:
            self._parameters = ray.get_actor(name, namespace=NAMESPACE)
        threads = max(int(self.cpus_per_worker), 1)
        variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **self.environment}
        options: dict[str, Any] = {
            "num_cpus": self.cpus_per_worker,
            "num_gpus": self.gpus_per_worker,
            "concurrency_groups": {"memory": 1},
            "runtime_env": {"env_vars": variables},
        }
        worker: Any = ray.remote(**options)(SamplingWorker)
        arguments = (policy.config, self.tokenizer, self.sampler, self._parameters, threads)
        crew = Crew(lambda number: worker.remote(*arguments), self.num_workers, self.max_deaths)
        self._started_for = asdict(policy.config)
        self._started_cluster = started
        weakref.finalize(self, crew.let_go)
        return crew

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams, urgent: bool = False) -> RayDrawing:
        """Begin to draw, with the newest weights that there are when an item's turn comes.

        Args:
            requests: What to draw; those of a prompt are adjacent.
            params: How.
            urgent: Before all that waits.
        """
        crew = self._crew()
        autocast = next((torch.get_autocast_dtype(k) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)), None)
        groups = [list(group) for _, group in groupby(requests, key=lambda r: r.prompt_index)]
        size = self.prompts_per_item
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        items = [
            Item([request for group in part for request in group], params, autocast, number % self.num_workers)
            for number, part in enumerate(parts)
        ]
        return crew.submit(items, urgent)

    def _crew(self) -> Crew:
        if self.crew is None:
            raise RuntimeError("Call sync(policy) first: there are no workers yet.")
        return self.crew

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order, by the newest weights and before all that waits."""
        return self.submit(requests, params, urgent=True).result()

    def memory(self, worker: int, capacity: int, update: float) -> RemoteMemory:
        """What a worker remembers, in its process: see :class:`~rlalign.rollouts.worker_memory.WorkerMemory`."""
        return RemoteMemory(self._crew, worker, capacity, update)

    def release(self) -> None:
        """Have workers give back memory, where they have nothing to do while the policy learns."""
        if self.staleness == 0 and self.crew is not None:
            for worker in self.crew.workers:
                worker.release.remote()

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        if self.crew is None:
            return
        import ray

        self.crew.close()
        self.crew, self._parameters, self._published, self.version = None, None, None, 0
        if self._started_cluster:
            ray.shutdown()
