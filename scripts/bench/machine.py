"""What a machine can do, measured: products, memory, new pages; and one call of either attention."""

import mmap
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlalign.models.attention import GROUPED, grouped_attention
from rlalign.models.fused import fuse

_BYTES = 1 << 28  # more than caches hold


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Of one call, the best of a few, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def flops(rows: int, inner: int, outer: int, dtype: torch.dtype) -> float:
    """FLOPs a second of a product with a weight."""
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(outer, inner, dtype=dtype)
    repeats = max(1, int(1e9 / (2 * rows * inner * outer)))
    return 2 * rows * inner * outer * repeats / seconds(lambda: [linear(x, weight) for _ in range(repeats)])


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(_BYTES // 4)
    target = torch.empty_like(source).fill_(0)
    return 2 * _BYTES / seconds(lambda: target.copy_(source))


def fault_seconds() -> float:
    """Of a page that is new."""
    pages = mmap.mmap(-1, _BYTES)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    first_of_page = torch.frombuffer(pages, dtype=torch.uint8)[:: mmap.PAGESIZE]
    began = time.perf_counter()
    first_of_page.fill_(1)
    new = time.perf_counter() - began
    return (new - seconds(lambda: first_of_page.fill_(1))) / len(first_of_page)


def attention_seconds(
    rows: int, length: int, heads: int, keys: int, size: int, dtype: torch.dtype
) -> tuple[float, float]:
    """One call forward and backward, by scaled dot-product attention and by ours, with a mask."""
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // keys, True  # type: ignore[assignment]
    query, key, value = (
        torch.randn(rows, count, length, size, dtype=dtype, requires_grad=True) for count in (heads, keys, keys)
    )
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()

    def call(attend: Callable[..., tuple[torch.Tensor, None]]) -> None:
        attend(module, query, key, value, mask, scaling=size**-0.5)[0].sum().backward()

    return seconds(lambda: call(sdpa_attention_forward)), seconds(lambda: call(grouped_attention))


def layer_seconds(config: PretrainedConfig, rows: int, length: int, dtype: torch.dtype) -> tuple[float, float]:
    """A layer of a model forward and backward, as transformers has it, and with fused parts."""
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 64})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=GROUPED).eval()
    ids = torch.randint(0, 64, (rows, length))

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        states.sum().backward()

    plain = seconds(call)
    if not fuse(model):
        return plain, plain
    return plain, seconds(call)
