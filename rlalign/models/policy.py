"""The language model being trained, and the frozen one it is measured against."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlalign.assets import resolve, told_if_missing
from rlalign.models.attention import GROUPED
from rlalign.models.compression import compressed_activations
from rlalign.models.fused import fuse
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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class PolicyConfig:
    """Which model to train, and which part of it."""

    model: str = "embedded"
    """Folder or hub name of a causal language model; ``embedded`` is the small one that comes with rlalign."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: float = 32.0
    """Scale of the adapters: their output is multiplied by ``lora_alpha / lora_rank``."""
    lora_dropout: float = 0.0
    """Dropout before the adapters, active in the gradient pass only."""
    lora_targets: list[str] | str = "all-linear"
    """Names of the layers that get an adapter."""
    adapter: str | None = None
    """Folder of a trained LoRA adapter to continue from; it is also the reference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights. Full training needs float32: small updates vanish in bfloat16. A LoRA base does not."""
    dropout: bool = False
    """Leave the model's own dropout on in the gradient pass."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compress_activations: Literal["bfloat16", "int8"] | None = None
    """Keep activations for the backward pass in fewer bits (:mod:`rlalign.models.compression`): less memory, rough
    gradients. Log-probabilities are as without."""
    attn_implementation: str | None = None
    """Attention kernel of transformers (``sdpa``, ``eager``, ``flash_attention_2``); by default its own choice, but
    :func:`~rlalign.models.attention.grouped_attention` in place of ``sdpa`` on a CPU."""
    fused_layers: bool = True
    """Let norms, rotary positions and gates of layers like Llama's have gradients of their own, which keep half as much
    (:mod:`rlalign.models.fused`); other models compute as transformers does."""
    tf32: bool = False
    """Let float32 matrix products use TensorFloat-32 on GPUs that have it."""
    chunk_tokens: int = 1024
    """Positions whose logits exist at once."""
    share_prompts: bool | None = None
    """Compute a prompt that several rows of a minibatch have in common once, forward and backward, and no padding:
    equal but for rounding, and several times faster where prompts are longer than responses. By default wherever it can
    be done (:func:`~rlalign.models.scoring.can_lay_flat`) and the rows at hand make it pay; not with dropout."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0 or self.chunk_tokens < 1:
            raise ValueError(
                f"lora_rank must be >= 0 and chunk_tokens >= 1, got {self.lora_rank} and {self.chunk_tokens}."
            )
        if self.share_prompts and (self.dropout or self.lora_dropout):
            raise ValueError(
                "policy.share_prompts computes a prompt once, and dropout differs from row to row: use one of them."
            )
        if self.compress_activations and self.activation_checkpointing:
            raise ValueError(
                "policy.activation_checkpointing keeps next to no activations, policy.compress_activations fewer bits "
                "of them: use one of them."
            )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}.")
        if self.dtype == "bfloat16" and not self.uses_lora:
            raise ValueError(
                "policy.dtype=bfloat16 trains bfloat16 weights, which small updates do not move: use float32 weights "
                "with --trainer.precision=bf16-mixed, or LoRA (policy.lora_rank) on a bfloat16 base."
            )

    @property
    def uses_lora(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora_rank > 0 or self.adapter is not None


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
        )
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
        elif config.lora_rank:
            lora = LoraConfig(
                r=config.lora_rank,
                lora_alpha=cast(int, config.lora_alpha),
                lora_dropout=config.lora_dropout,
                target_modules=config.lora_targets,
                task_type="CAUSAL_LM",
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.lm = get_peft_model(base, lora)
                if with_reference and moves_reference:
                    add_reference_adapter(self.lm, lora)
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
            ValueError: If ranks are to share products of a model with adapters, or of one that does not allow it.
        """
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
            is_dropout = self.config.dropout or (self.config.lora_dropout > 0 and "lora_dropout" in name)
            if is_dropout or (self.config.activation_checkpointing and isinstance(module, GradientCheckpointingLayer)):
                module.training = True
                chosen.append(module)
        try:
            with compressed_activations(self.model, self.config.compress_activations):
                yield
        finally:
            for module in chosen:
                module.training = False

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
        if not torch.allclose(got, want, atol=1e-3 if self.config.dtype == "float32" else 0.1):
            raise ValueError(
                f"{type(model).__name__} does something to its logits that rlalign does not know (log-probabilities "
                f"differ by {(got - want).abs().max():.3g}); add it to rlalign.models.scoring.adjust_logits."
            )
