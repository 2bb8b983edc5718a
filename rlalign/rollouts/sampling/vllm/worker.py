"""What rlalign adds to a worker of vLLM, by ``worker_extension_cls``: it takes weights, and tempers logits.

It is imported where vLLM computes, which may be another process and another environment: it needs vLLM and torch only.
Written for vLLM 0.32 (its layerwise reloading), which is what the extra ``vllm`` asks for.
"""

import base64
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class PolicyWorker:
    """Methods of a worker that can be called by ``collective_rpc``; the server passes strings and numbers only."""

    model_runner: Any
    vllm_config: Any
    _rlalign_temperature: float = 1.0
    _rlalign_hooked: bool = False
    _rlalign_loaded: set[str]
    _rlalign_buffer: bytearray
    _rlalign_cache: list[tuple[Any, int]]

    def rlalign_facts(self) -> dict[str, Any]:
        """What the other side needs to know."""
        config = self.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        return {
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "can_sleep": not on_cpu and bool(config.model_config.enable_sleep_mode),
            "keeps_packed_weights": on_cpu and not config.model_config.enforce_eager,
        }

    # ---- temperature -------------------------------------------------------------------------------------------------

    def rlalign_temper(self, temperature: float) -> None:
        """Divide all logits from now on, so that vLLM's raw log-probabilities are of the tempered distribution.

        vLLM offers log-probabilities before the temperature (raw) or after top-k and top-p, which renormalise
        (processed). A policy's ratio needs those between the two.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self._rlalign_temperature = float(temperature)
        if self._rlalign_hooked:
            return

        def divide(module: nn.Module, args: Any, logits: Tensor | None) -> Tensor | None:
            return None if logits is None else logits.float() / self._rlalign_temperature

        heads = [m for m in self.model_runner.get_model().modules() if isinstance(m, LogitsProcessor)]
        if len(heads) != 1:
            raise RuntimeError(f"This model of vLLM has {len(heads)} logits processors; rlalign can temper one.")
        heads[0].register_forward_hook(divide)
        self._rlalign_hooked = True

    # ---- weights -----------------------------------------------------------------------------------------------------

    def rlalign_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over all weights, by the names of a checkpoint; for an engine in the same process."""
        self.rlalign_begin()
        self._rlalign_take(weights)
        self.rlalign_finish()

    def rlalign_begin(self) -> None:
        """Make ready for weights: what vLLM made of the old ones (packed, fused) is to be made again."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._rlalign_loaded, self._rlalign_buffer = set(), bytearray()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def rlalign_receive(self, name: str, dtype: str, shape: str, data: str, is_last: str) -> None:
        """A piece of a weight, or all of it.

        Args:
            name: Of the weight.
            dtype: ``float32``, say.
            shape: Sizes, with commas between them.
            data: Bytes of the weight, in base64, that follow those received before.
            is_last: ``"1"`` if it is then complete.
        """
        self._rlalign_buffer += base64.b64decode(data)
        if is_last == "1":
            sizes = [int(size) for size in shape.split(",") if size]
            tensor = torch.frombuffer(self._rlalign_buffer, dtype=getattr(torch, dtype)).view(sizes)
            self._rlalign_buffer = bytearray()  # the tensor keeps the old one
            self._rlalign_take([(name, tensor)])

    def _rlalign_take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self._rlalign_loaded |= set(self.model_runner.get_model().load_weights(weights))

    def rlalign_finish(self) -> None:
        """Compute with the new weights from now on.

        Raises:
            RuntimeError: If a weight did not come.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                    # A head tied to the embedding has received nothing, but on a CPU keeps a packed copy.
                    module.quant_method.process_weights_after_loading(module)
        missing = {name for name, _ in model.named_parameters()} - self._rlalign_loaded
        if missing:
            raise RuntimeError(f"vLLM has not been given {len(missing)} of its weights, {min(missing)} for one.")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def rlalign_drop_cache(self) -> None:
        """Give back the memory of the cache of keys and values; for CPUs, where vLLM cannot sleep."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.model_runner.kv_caches}
        self._rlalign_cache = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        for storage, _ in self._rlalign_cache:
            storage.resize_(0)

    def rlalign_restore_cache(self) -> None:
        """Have a cache again, which is empty."""
        for storage, size in getattr(self, "_rlalign_cache", []):
            storage.resize_(size)
            storage.fill_(0)
        self._rlalign_cache = []
