"""Kinds of adapters: small sets of new weights that are trained in place of the model's own.

Here are those for which three things hold, which the rest of rlalign takes for granted: a new adapter changes nothing,
so that the model without it is the reference; a trained one is the same as other weights of the layers it is on, so
that it can be merged for sampling and for export; and what differs between two of them is in their own weights.
PiSSA, for one, moves a part of the base weights into the adapter, and has no reference left.
"""

from typing import Any, Literal, cast

from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, VeraConfig

AdapterType = Literal["lora", "rslora", "dora", "vera", "loha", "lokr", "ia3"]

_OF_INPUT = ("down_proj", "fc2", "wo", "c_proj")  # where (IA)^3 scales what goes into the layer
_WITHOUT_DROPOUT = ("loha", "lokr", "ia3")
_WITHOUT_ALPHA = ("vera", "ia3")
QUANTIZABLE = ("lora", "rslora", "dora")
"""Kinds that can be on quantised weights."""
DEFAULT_ALPHA = 32.0


def check_adapter(kind: AdapterType, rank: int, alpha: float, dropout: float) -> None:
    """Refuse a setting that the kind of adapter has no place for.

    Args:
        kind: Of adapter.
        rank: See :func:`adapter_config`.
        alpha: See there.
        dropout: See there.

    Raises:
        ValueError: If there is one.
    """
    if kind == "ia3" and rank:
        raise ValueError(f"policy.adapter_type=ia3 has one number a channel and no rank: leave out lora_rank={rank}.")
    if kind not in ("lora", "ia3") and not rank:
        raise ValueError(f"policy.adapter_type={kind} needs a rank: set policy.lora_rank, say to 16.")
    if dropout and kind in _WITHOUT_DROPOUT:
        raise ValueError(f"policy.adapter_type={kind} has no dropout of its input: leave out lora_dropout={dropout}.")
    if alpha != DEFAULT_ALPHA and kind in _WITHOUT_ALPHA:
        raise ValueError(f"policy.adapter_type={kind} learns its scale: leave out lora_alpha={alpha}.")


def adapter_config(kind: AdapterType, rank: int, alpha: float, dropout: float, targets: list[str] | str) -> PeftConfig:
    r"""What peft is to be told for a new adapter.

    With a weight :math:`W` of a layer, a rank :math:`r` and a scale :math:`\alpha`, the layer computes with

    - ``lora``: :math:`W + \frac{\alpha}{r} B A` (Hu et al. 2021, https://arxiv.org/abs/2106.09685);
    - ``rslora``: :math:`W + \frac{\alpha}{\sqrt r} B A` (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732);
    - ``dora``: rows of :math:`W + \frac{\alpha}{r} B A`, each brought to a length that is learned (Liu et al. 2024,
      https://arxiv.org/abs/2402.09353);
    - ``vera``: :math:`W + \Lambda_b B \Lambda_d A` with random :math:`A, B` that all layers share and two learned
      diagonals (Kopiczko et al. 2023, https://arxiv.org/abs/2310.11454);
    - ``loha``: :math:`W + \frac{\alpha}{r} (B_1 A_1) \odot (B_2 A_2)` (Hyeon-Woo et al. 2021,
      https://arxiv.org/abs/2108.06098);
    - ``lokr``: :math:`W + \frac{\alpha}{r} C \otimes (B A)` (Yeh et al. 2023, https://arxiv.org/abs/2309.14859);
    - ``ia3``: a learned factor for each output of the layer, or for each input where it is the last of an MLP
      (``down_proj``, ``fc2``, ``wo``, ``c_proj``) and is named so in ``targets`` (Liu et al. 2022,
      https://arxiv.org/abs/2205.05638).

    Args:
        kind: Of adapter.
        rank: Its rank :math:`r`; 0 for ``ia3``.
        alpha: Its scale :math:`\alpha`; ``vera`` and ``ia3`` have none.
        dropout: Before the adapter, for ``lora``, ``rslora``, ``dora`` and ``vera``.
        targets: Names of the layers that get one, or ``all-linear``: all linear layers but the last.
    """
    task: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": targets}
    if kind == "ia3":
        named = [targets] if isinstance(targets, str) else targets
        return IA3Config(feedforward_modules=[name for name in named if name in _OF_INPUT], **task)
    if kind == "vera":
        return VeraConfig(r=rank, vera_dropout=dropout, **task)
    scale = cast(int, alpha)
    if kind == "loha":
        return LoHaConfig(r=rank, alpha=scale, **task)
    if kind == "lokr":
        return LoKrConfig(r=rank, alpha=scale, **task)
    variant: dict[str, Any] = {"use_rslora": kind == "rslora", "use_dora": kind == "dora"}
    return LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, **variant, **task)


def is_adapter_dropout(name: str) -> bool:
    """Whether a module of this name is the dropout before an adapter."""
    return "lora_dropout" in name or "vera_dropout" in name
