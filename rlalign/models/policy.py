"""The language model being trained, and the frozen one it is measured against."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlalign.assets import resolve, told_if_missing
from rlalign.models.adapters import adapter_config, is_adapter_dropout
from rlalign.models.attention import GROUPED
from rlalign.models.compression import compressed_activations
from rlalign.models.config import DTYPES, PolicyConfig
from rlalign.models.fused import fuse
from rlalign.models.quantized import settle
from rlalign.models.reference import add_reference_adapter
from rlalign.models.scoring import (
    TokenScores,
    can_lay_flat,
    final_states,
    scalar_of_states,
    scores_of_states,
    token_scores,
)
from rlalign.models.sharding import gathered, share_products


def locate_model(name: str) -> str:
    """What ``from_pretrained`` is to be given for a model: a folder, checked to be one, or a name on the hub.

    Raises:
        FileNotFoundError: If the name looks like a folder but is none.
    """
    path = resolve(name)
    if not path.startswith((".", "/", "~")) and path.count("/") <= 1:
        return path
    if not (Path(path).expanduser() / "config.json").is_file():
        raise FileNotFoundError(
            f"policy.model={name}: no config.json in that folder. Give a folder that save_pretrained wrote, a name on "
            "the Hugging Face hub, or 'embedded'."
        )
    return str(Path(path).expanduser())


def load_model(config: PolicyConfig) -> PreTrainedModel:
    """The causal language model named in the configuration, in evaluation mode.

    Raises:
        FileNotFoundError: If the name looks like a folder but is none.
    """
    path = locate_model(config.model)
    with told_if_missing(path):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[config.dtype],
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            **config.quantization.options(),
        )
    settle(model)
    if config.attn_implementation is None and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
    if config.fused_layers:
        fuse(model)
    return model.eval()


def _inner(lm: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model, with its adapters inside if it has any."""
    return cast(PreTrainedModel, lm.get_base_model()) if isinstance(lm, PeftModel) else lm


class Policy(nn.Module):
    """A causal language model whose forward pass is the scoring of given tokens.

    Everything that computes goes through ``forward``, so that DDP, FSDP2 and DeepSpeed see it. The model is always in
    evaluation mode, except for the dropout that the configuration asks for, in the gradient pass.

    Args:
        config: Which model.
        with_reference: Keep what is needed to score under the frozen starting point.
        seed: Decides the first weights of new adapters.
        with_value_head: Have a head that makes a value of each final hidden state; it starts from zero.
        moves_reference: Let new adapters have a reference with weights of its own, for
            :func:`~rlalign.models.reference.update_reference`; else theirs is the model without them.
    """

    def __init__(
        self,
        config: PolicyConfig,
        with_reference: bool = False,
        seed: int = 0,
        with_value_head: bool = False,
        moves_reference: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        if config.tf32:
            torch.set_float32_matmul_precision("high")
        base = load_model(config)
        self.reference: PreTrainedModel | None = None
        self._mirror: list[PreTrainedModel | PeftModel] = []
        self.lm: PreTrainedModel | PeftModel
        if config.adapter is not None:
            self.lm = PeftModel.from_pretrained(base, config.adapter, is_trainable=True, torch_device="cpu")
            if with_reference:
                self.lm.load_adapter(config.adapter, "reference", is_trainable=False, torch_device="cpu")
        elif config.uses_lora:
            new = adapter_config(
                config.adapter_type, config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.lm = get_peft_model(base, new)
                if with_reference and moves_reference:
                    add_reference_adapter(self.lm, new)
        else:
            self.lm = base
            if with_reference:
                self.reference = copy.deepcopy(base).requires_grad_(False)
        self.lm.eval()
        self.has_reference = with_reference
        self.value_head: nn.Linear | None = None
        if with_value_head:
            self.value_head = nn.Linear(base.config.get_text_config().hidden_size, 1)
            for parameter in self.value_head.parameters():
                nn.init.zeros_(parameter)
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._check_scores()
        self._can_lay_flat = config.share_prompts is not False and can_lay_flat(self.model)
        if config.share_prompts and not self._can_lay_flat:
            raise ValueError(
                f"policy.share_prompts does not go with {type(self.model).__name__}: not all of its attention is "
                f"full, or not that of attn_implementation={GROUPED}. Leave it out."
            )

    def train(self, mode: bool = True) -> "Policy":
        """Set the mode of this module alone: the models in it stay in evaluation mode."""
        self.training = mode
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, with its adapters inside if it has any."""
        return _inner(self.lm)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        response_mask: Tensor,
        temperature: float = 1.0,
        reference: bool = False,
        positions: Tensor | None = None,
        values: Literal["body", "head"] | None = None,
    ) -> TokenScores | tuple[TokenScores, Tensor]:
        """Log-probabilities and entropies of the response tokens; see :func:`token_scores`.

        Args:
            input_ids: Prompt and response, ``[B, P + T]``.
            attention_mask: True on real tokens, ``[B, P + T]``; ``None`` for packed rows.
            response_mask: True on the tokens to score, ``[B, T]``.
            temperature: Of the distribution.
            reference: Score under the frozen starting point instead; never differentiated.
            positions: Of packed rows, ``[B, P + T]``.
            values: Give also the value of the state before each token and of the one after the last, ``[B, T + 1]``;
                of padding they mean nothing. Their gradient goes through the ``body`` of the model, or ends at the
                value ``head``.
        """
        limits = (self.config.chunk_tokens, positions, self.shares_prompts)
        arguments = (input_ids, attention_mask, response_mask, temperature, *limits)
        if reference:
            with torch.no_grad(), self._as_reference() as model:
                return token_scores(model, *arguments)
        with self._gradient_mode() if torch.is_grad_enabled() else nullcontext():
            if values is not None:
                return self._scores_and_values(*arguments, through_body=values == "body")
            return token_scores(self.model, *arguments)

    def _scores_and_values(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        response_mask: Tensor,
        temperature: float,
        chunk_tokens: int,
        positions: Tensor | None,
        share_prompts: bool,
        through_body: bool,
    ) -> tuple[TokenScores, Tensor]:
        if self.value_head is None:
            raise RuntimeError("This policy was built without a value head; build it with with_value_head=True.")
        width = response_mask.shape[1]
        states = final_states(self.model, input_ids, attention_mask, width, positions, share_prompts, with_last=True)
        scored = (states[:, :-1], input_ids[:, -width:], response_mask, temperature, chunk_tokens)
        values = scalar_of_states(states if through_body else states.detach(), self.value_head)
        return scores_of_states(self.model, *scored), values

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts that rows have in common may be computed once."""
        if self.config.share_prompts is not None:
            return self.config.share_prompts
        return self._can_lay_flat and not self.has_dropout

    @contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        if not self.has_reference:
            raise RuntimeError("This policy was built without a reference; build it with with_reference=True.")
        if self.reference is not None:
            yield self.reference
        elif "reference" in cast(PeftModel, self.lm).peft_config:
            adapters: Any = cast(PeftModel, self.lm).base_model
            adapters.set_adapter("reference", inference_mode=True)
            try:
                yield self.model
            finally:
                adapters.set_adapter("default", inference_mode=False)
        else:
            with cast(PeftModel, self.lm).disable_adapter():
                yield self.model

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread the weights over the ranks of a mesh (FSDP2): every decoder layer, then what is left.

        Args:
            mesh: Its dimensions are ``data_parallel``, over which weights are spread, and ``tensor_parallel``, whose
                ranks share products.

        Raises:
            ValueError: If the weights are quantised, or ranks are to share products of a model with adapters, or of one
                that does not allow it.
        """
        if self.config.is_quantized:
            raise ValueError("Weights of four bits (policy.quantization) cannot be sharded by FSDP2: use DDP.")
        self.keep_mirror()
        shared, mesh = mesh["tensor_parallel"], mesh["data_parallel"]
        if shared.size() > 1 and self.config.uses_lora:
            raise ValueError("tensor_parallel_size: products with LoRA adapters cannot be shared; use FSDP2 alone.")
        for model in filter(None, (self.model, self.reference)):
            if shared.size() > 1:
                share_products(model, shared)
            blocks = set(model._no_split_modules or ())
            for module in model.modules():
                if type(module).__name__ in blocks:
                    fully_shard(module, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def keep_mirror(self) -> None:
        """Have an empty copy to gather weights in, before a strategy spreads them."""
        mirror = copy.deepcopy(self.lm).requires_grad_(False)
        for parameter in mirror.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._mirror = [mirror]  # in a list: no part of this module

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on this rank."""
        return not self._mirror

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """The transformers model with all of its weights, to sample from; every rank must enter together.

        Sharded weights are gathered once into a copy, so that nothing is exchanged while tokens are drawn and ranks
        need not take equally many steps.
        """
        if not self._mirror:
            yield self.model
            return
        (mirror,) = self._mirror
        for whole, part in zip(mirror.parameters(), self.lm.parameters(), strict=True):
            whole.data = gathered(part)
        try:
            yield _inner(mirror)
        finally:
            for parameter in mirror.parameters():
                parameter.data = parameter.data.new_empty(0)

    @property
    def has_dropout(self) -> bool:
        """Whether the gradient pass draws random numbers."""
        return self.config.dropout or self.config.lora_dropout > 0

    @contextmanager
    def _gradient_mode(self) -> Iterator[None]:
        """Evaluation mode, but for the dropout asked for and activation checkpointing, which looks at ``training``."""
        chosen = []
        for name, module in self.lm.named_modules():
            is_dropout = self.config.dropout or (self.config.lora_dropout > 0 and is_adapter_dropout(name))
            if is_dropout or (self.config.activation_checkpointing and isinstance(module, GradientCheckpointingLayer)):
                module.training = True
                chosen.append(module)
        try:
            with compressed_activations(self.model, self.config.compress_activations):
                yield
        finally:
            for module in chosen:
                module.training = False

    @property
    def _is_rough(self) -> bool:
        """Whether it computes in bfloat16 without being told to by autocast."""
        quantization = self.config.quantization
        is_rough = quantization.type is not None and quantization.compute_dtype == "bfloat16"
        return is_rough or self.config.dtype == "bfloat16"

    @torch.no_grad()
    def _check_scores(self) -> None:
        """Refuse an architecture whose logits are not what :func:`token_scores` takes them to be."""
        model = self.model
        if model.device.type == "meta":
            return
        ids = torch.arange(1, 9).remainder(model.config.get_text_config().vocab_size).unsqueeze(0)
        mask = torch.ones_like(ids).bool()
        got = token_scores(model, ids, mask, mask[:, 1:]).logprobs
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
        want = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        if not torch.allclose(got, want, atol=0.1 if self._is_rough else 1e-3):
            raise ValueError(
                f"{type(model).__name__} does something to its logits that rlalign does not know (log-probabilities "
                f"differ by {(got - want).abs().max():.3g}); add it to rlalign.models.scoring.adjust_logits."
            )
