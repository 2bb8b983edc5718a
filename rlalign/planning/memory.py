"""The memory of a rank, part by part and phase by phase.

A run has phases that never overlap: sampling, scoring, update. The peak is that of the phase which takes most. Every
part is a count of numbers times their size; docs/plan.md has the formulas.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from rlalign.planning.methods import MethodParts
from rlalign.planning.shapes import ModelShape

Peft = Literal["full", "lora", "qlora"]
Precision = Literal["32-true", "bf16-mixed"]
FLOAT32, BFLOAT16 = 4.0, 2.0
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight of four bits, blocks of 64 with a scale of 8 bits, these in blocks of 256 with one of 32 bits."""
_SCRATCH = 2 * (1 << 21) * FLOAT32  # of the output layer on a CPU, see rlalign.models.head
_LONG_SCORES = 1 << 20  # beyond them a CPU's attention keeps no probabilities, see rlalign.models.attention
_UNFUSED = 2.0  # what layers of transformers' own modules keep, over what fused ones do


@dataclass(frozen=True)
class Workload:
    """What a rank computes at once."""

    rows: int
    """Items of a minibatch: responses, or pairs."""
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response."""
    group: int = 1
    """Responses to a prompt."""
    sampled: int = 256
    """Responses in flight while sampling."""
    accumulates: bool = True
    """Whether gradients of earlier minibatches are there already."""
    checkpointing: bool = False
    chunk: int = 1024
    """Positions whose logits exist at once."""


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    peft: Peft = "full"
    rank: int = 16
    precision: Precision = "bf16-mixed"
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that adapters are added to."""
    moments: int = 2
    """Numbers that the optimizer keeps of each trained weight: 2 for Adam, 1 for RMSprop, 0 for descent."""
    on_cpu: bool = False


@dataclass(frozen=True)
class Sharding:
    """Over how many ranks each part is spread."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    tensor: int = 1
    """Ranks that share the products of a layer."""
    offload_optimizer: bool = False
    offload_weights: bool = False
    master: bool = False
    """Whether short weights are trained by float32 copies that belong to the optimizer (DeepSpeed)."""


@dataclass
class Estimate:
    """Bytes of a rank."""

    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> part -> bytes."""
    overhead: float = 0.0
    """What is there whatever the model: libraries, a context."""
    waste: float = 0.0
    """Share of what comes and goes that memory takes beyond it."""
    host: float = 0.0
    """Bytes in the host's memory."""

    LASTING = ("weights", "optimizer", "reference", "critic")

    def total(self, phase: str) -> float:
        """Of a phase; holes are among what comes and goes."""
        parts = self.phases[phase]
        passing = sum(size for name, size in parts.items() if name not in self.LASTING)
        return self.overhead + sum(parts.values()) + self.waste * passing

    @property
    def peak_phase(self) -> str:
        """That which takes most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return self.total(self.peak_phase)

    @property
    def parts(self) -> dict[str, float]:
        """The most that each part ever takes."""
        names = [name for parts in self.phases.values() for name in parts]
        return {name: max(parts.get(name, 0.0) for parts in self.phases.values()) for name in dict.fromkeys(names)}


def estimate(
    shape: ModelShape, method: MethodParts, setting: Setting, work: Workload, sharding: Sharding = Sharding()
) -> Estimate:
    """The memory of a rank.

    Args:
        shape: Of the policy; critic and reference are alike.
        method: What is kept beside it.
        setting: How it is trained.
        work: What is computed at once.
        sharding: What the strategy spreads.
    """
    lasting = _lasting(shape, method, setting, sharding)
    trained = _trained(shape, method, setting)
    gradient_size = BFLOAT16 if sharding.master and setting.precision == "bf16-mixed" else FLOAT32
    gradients = {"gradients": 0.0 if sharding.offload_optimizer else gradient_size * trained / sharding.gradients}
    tokens, pairs = _positions(work, method, setting)
    gathered = {"gathered layers": _gathered_layers(shape, setting, sharding)}
    low = _compute_size(setting)
    activations = kept_activations(shape, setting, work, tokens, pairs, sharding.tensor)
    copies = 0.0
    if setting.precision == "bf16-mixed" and not sharding.master and _weight_size(setting) == FLOAT32:
        copies = BFLOAT16 * shape.projections / sharding.tensor  # autocast's, kept for the backward pass
        copies = copies / shape.layers if work.checkpointing else copies
    if method.critic:
        whole_rows = work.rows * (work.prompt + work.response)
        pairs_of_critic = whole_rows * (work.prompt + work.response)
        alone = replace(setting, peft="full")
        activations += kept_activations(shape, alone, work, whole_rows, pairs_of_critic, sharding.tensor)
    scored = 0 if method.scalar else _scored(work, method)
    logits = _logits(shape, setting, work, scored)
    # When the gradients of a layer are there, the logits are gone.
    activations += copies + max(_one_layer(shape, setting, tokens, sharding.tensor) - logits, 0.0)
    update = {**lasting, **gathered, "activations": activations, "logits": logits}
    phases = {"update": update | (gradients if work.accumulates or not trained else {})}
    if not work.accumulates:
        phases["backward"] = {**lasting, **gathered, **gradients, "activations": activations / 2}
    if method.reference or method.critic:
        inside = _one_layer(shape, setting, tokens, sharding.tensor)
        logits = min(scored, work.chunk) * shape.vocabulary * low + (_SCRATCH if setting.on_cpu else 0)
        phases["scoring"] = {**lasting, **gathered, "activations": inside, "logits": logits}
    works_here = not (setting.on_cpu or sharding.offload_optimizer)  # Adam on a GPU has a list of square roots
    workspace = FLOAT32 * trained / sharding.optimizer if works_here else 0.0
    phases["step"] = {**lasting, **gradients, "optimizer's workspace": workspace}
    if method.samples:
        phases |= _sampling(shape, method, setting, work, sharding, lasting)
    kept = {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}
    return Estimate(kept, host=_on_host(shape, method, setting, sharding))


def _other_size(setting: Setting) -> float:
    """Bytes of a weight that no adapter is added to: embeddings, norms."""
    return BFLOAT16 if setting.peft == "qlora" else _weight_size(setting)


def _weight_size(setting: Setting) -> float:
    """Bytes of a weight of the policy's projections."""
    if setting.peft == "full":
        return FLOAT32
    return NF4 if setting.peft == "qlora" else FLOAT32 if setting.base_dtype == "float32" else BFLOAT16


def _model_bytes(shape: ModelShape, setting: Setting) -> float:
    """Of the policy's own weights, whole."""
    others = shape.parameters - shape.projections
    return _weight_size(setting) * shape.projections + _other_size(setting) * others


def _compute_size(setting: Setting) -> float:
    return BFLOAT16 if setting.precision == "bf16-mixed" else FLOAT32


def _trained(shape: ModelShape, method: MethodParts, setting: Setting) -> int:
    """Trained weights, a critic's among them."""
    body = shape.parameters - (shape.head if shape.parameters - shape.projections >= 2 * shape.head else 0)
    if method.scalar and setting.peft == "full":
        return body
    own = shape.parameters if setting.peft == "full" else shape.adapters(setting.rank)
    return own + (body if method.critic else 0)


def _lasting(shape: ModelShape, method: MethodParts, setting: Setting, sharding: Sharding) -> dict[str, float]:
    """What is there in every phase, by part."""
    full = _model_bytes(shape, setting)
    adapters = 0 if setting.peft == "full" else FLOAT32 * shape.adapters(setting.rank)
    body = shape.parameters - (shape.head if shape.parameters - shape.projections >= 2 * shape.head else 0)
    if sharding.master and setting.precision == "bf16-mixed" and setting.peft == "full":
        full /= 2
    if method.scalar:
        full = FLOAT32 * body
    weights = 0.0 if sharding.offload_weights else (full + adapters) / sharding.weights
    trained = _trained(shape, method, setting)
    moments = FLOAT32 * (setting.moments + (1 if sharding.master else 0)) * trained / sharding.optimizer
    reference = full if method.reference and setting.peft == "full" else 0.0
    return {
        "weights": weights,
        "optimizer": 0.0 if sharding.offload_optimizer else moments,
        "reference": reference / sharding.weights,
        "critic": FLOAT32 * body / sharding.weights if method.critic else 0.0,
    }


def _on_host(shape: ModelShape, method: MethodParts, setting: Setting, sharding: Sharding) -> float:
    """What a rank keeps in the host's memory: float32 weights and moments, gradients, and the weights themselves."""
    trained = _trained(shape, method, setting)
    found = 0.0
    if sharding.offload_optimizer:
        found += FLOAT32 * (setting.moments + 2) * trained / sharding.optimizer
    if sharding.offload_weights:
        found += _lasting(shape, method, setting, replace(sharding, offload_weights=False))["weights"]
    return found


def _gathered_layers(shape: ModelShape, setting: Setting, sharding: Sharding) -> float:
    """Two layers at a time are whole where weights are spread: the one that computes, and the next."""
    if sharding.weights == 1 or sharding.weights == sharding.tensor:
        return 0.0
    size = BFLOAT16 if sharding.master and setting.precision == "bf16-mixed" else _weight_size(setting)
    ends = shape.parameters - shape.projections
    return (2 * size * shape.layer + _weight_size(setting) * ends) / sharding.tensor


def _positions(work: Workload, method: MethodParts, setting: Setting) -> tuple[float, float]:
    """Positions of a minibatch, and pairs of a query and a key; prompts that rows share are there once."""
    rows = work.rows * method.sequences
    shared = method.sequences if method.sequences > 1 else work.group if method.samples else 1
    prompts = rows if method.scalar or setting.peft == "qlora" else math.ceil(rows / shared)
    tokens = prompts * work.prompt + rows * work.response
    scores = prompts * work.prompt**2 + rows * work.response * (work.prompt + work.response)
    if prompts == rows:
        scores = rows * (work.prompt + work.response) ** 2
    return tokens, scores


def _scored(work: Workload, method: MethodParts) -> int:
    return work.rows * method.sequences * work.response


def kept_activations(
    shape: ModelShape, setting: Setting, work: Workload, tokens: float, pairs: float, tensor: int = 1
) -> float:
    """What the forward pass keeps for the backward pass, bytes.

    Of each token and layer, fused (``H`` hidden, ``Q`` queries, ``K`` keys, ``M`` inner width, ``b`` bytes of what
    computes): the residual stream before both norms in float32, ``2 * 4 H``; both norms' results, ``2 b H``; queries,
    keys and values ``b (Q + 2 K)``; the attention's result ``b Q``; gate, up and their product ``3 b M``. On a CPU
    attention keeps its probabilities, ``b`` bytes a head and pair of positions.
    """
    low = _compute_size(setting)
    stream = low if setting.peft != "full" and _other_size(setting) == BFLOAT16 else FLOAT32
    # Where rows share prompts, each has a copy of the keys and values that it sees.
    rows = work.rows * (work.prompt + work.response) if setting.on_cpu else 0
    seen = 2 * shape.keys * low * (tokens + rows) / tensor
    wide = 2 * shape.queries + 3 * shape.inner
    layer = 2 * stream * shape.hidden + low * (2 * shape.hidden + wide / tensor)
    if setting.peft != "full":
        layer += low * setting.rank * shape.projection_count / shape.layers  # what each adapter's first product writes
        if setting.precision == "bf16-mixed":
            layer += low * 3 * shape.hidden  # and a copy of what it reads
    of_attention = 0.0
    if setting.on_cpu and (work.prompt + work.response) ** 2 * shape.heads * shape.layers and not _is_long(shape, work):
        of_attention = low * shape.heads * pairs / tensor
    per_layer = layer * tokens * (1.0 if shape.is_fused else _UNFUSED) + seen + of_attention
    ends = FLOAT32 * shape.hidden * tokens * 2
    if work.checkpointing:
        return FLOAT32 * shape.hidden * tokens * shape.layers + per_layer + ends
    return shape.layers * per_layer + ends


def _is_long(shape: ModelShape, work: Workload) -> bool:
    share = max(shape.queries // max(shape.keys, 1), 1)
    return share * (work.prompt + work.response) ** 2 > _LONG_SCORES


def _logits(shape: ModelShape, setting: Setting, work: Workload, scored: int) -> float:
    """Logits and their gradient, and the output layer's gradient before it is added."""
    if not scored:
        return 0.0
    low = _compute_size(setting)
    found = 2 * low * shape.vocabulary * min(scored, work.chunk)
    if setting.peft == "full":
        found += (FLOAT32 + low) * shape.head * (2 if scored > work.chunk else 1)
    return found + low * shape.head * (low != FLOAT32) + (_SCRATCH if setting.on_cpu else 0)


def _one_layer(shape: ModelShape, setting: Setting, tokens: float, tensor: int) -> float:
    """What a layer without gradients takes."""
    low = _compute_size(setting)
    return tokens * (3 * FLOAT32 * shape.hidden + low * (3 * shape.inner + 2 * shape.queries) / tensor)


def _sampling(
    shape: ModelShape,
    method: MethodParts,
    setting: Setting,
    work: Workload,
    sharding: Sharding,
    lasting: dict[str, float],
) -> dict[str, dict[str, float]]:
    """Sampling, and on a CPU the comparison before the first one."""
    low = _compute_size(setting)
    columns = -(-(work.prompt + work.response) // 16) * 16
    cache = 2 * low * shape.keys * shape.layers * columns * work.sampled
    logits = (low + 2 * FLOAT32) * shape.vocabulary * work.sampled
    whole = _model_bytes(shape, setting) if sharding.weights > 1 or sharding.offload_weights else 0.0
    laid_out = low * (shape.projections + shape.head) if setting.on_cpu and shape.is_fused else 0.0
    parts = {**lasting, "gathered weights": whole, "sampler's weights": laid_out, "KV cache": cache, "logits": logits}
    phases = {"sampling": parts}
    if laid_out:
        first = {name: size for name, size in lasting.items() if name != "optimizer"}
        phases["first look"] = {
            **first,
            "gathered weights": whole,
            "sampler's weights": FLOAT32 * (shape.projections + shape.head),
        }
    return phases
