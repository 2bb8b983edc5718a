"""One section of ``scripts/gpu_check.py``, in a process of its own: ``on_device.py SECTION cpu|cuda SIZE MODEL_DIR``.

Prints a line ``row<TAB>what<TAB>value`` for each figure; a check that fails begins with ``failed``.
"""

import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}

import torch
import workload

ROOT = Path(__file__).resolve().parents[2]
Row = tuple[str, str]


@dataclass(frozen=True)
class Size:
    """Of the random model and of the work."""

    model: dict[str, int]
    vocabulary: int
    prompts: int = 8
    group: int = 16
    tokens: int = 256
    rows: int = 16
    """Of a forward and backward pass."""
    steps: int = 3
    learning: tuple[str, ...] = ()
    """Options of the learning run."""

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.group

    @property
    def case(self) -> workload.Case:
        """For what is shared with the benchmarks."""
        return workload.Case(f"{self.prompts} prompts, {self.group} responses of {self.tokens} tokens", self.tokens)


def _sizes(hidden: int, inner: int, layers: int, heads: int, keys: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    }


SIZES = {
    # That of Qwen2-0.5B.
    "full": Size(_sizes(896, 4864, 24, 14, 2), vocabulary=151_936),
    "small": Size(_sizes(896, 4864, 4, 14, 2), vocabulary=32_768, prompts=4, group=8, tokens=32, rows=8),
    "tiny": Size(
        _sizes(64, 128, 2, 4, 2),
        vocabulary=512,
        prompts=2,
        group=4,
        tokens=8,
        rows=4,
        steps=2,
        learning=("--trainer.max_epochs=2", "--data.prompts_per_iteration=4", "--data.val_limit=4"),
    ),
}


@dataclass(frozen=True)
class Here:
    """What a section is given."""

    device: str
    size: Size
    model: str


# ---- machine and model -----------------------------------------------------------------------------------------------


def machine(here: Here) -> Iterator[Row]:
    """What computes."""
    from rlalign.callbacks.performance import measured_peak
    from rlalign.callbacks.profile_facts import machine as name

    device = torch.device(here.device)
    yield "device", name(device)
    if here.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        yield "CUDA", f"{torch.version.cuda}, capability {major}.{minor}, {torch.cuda.device_count()} visible"
    for label, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        yield f"product of two matrices, {label}", f"{measured_peak(device, dtype) / 1e12:.3g} TFLOP/s"


def model(here: Here) -> Iterator[Row]:
    """A random model of Qwen2's kind, with a tokenizer whose ids are all words, though only bytes are ever read."""
    import json

    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from rlalign.assets import EMBEDDED_MODEL

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.save_pretrained(here.model)
    written = Path(here.model) / "tokenizer.json"
    content = json.loads(written.read_text())
    known = len(tokenizer)
    content["model"]["vocab"] |= {f"\u0120w{number}": number for number in range(known, here.size.vocabulary)}
    written.write_text(json.dumps(content))
    assert len(AutoTokenizer.from_pretrained(here.model)) == here.size.vocabulary
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=here.size.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **here.size.model,
        **ends,
    )
    torch.manual_seed(0)
    with torch.device(here.device):
        random = Qwen2ForCausalLM(config)
    random.to(torch.bfloat16).save_pretrained(here.model)
    yield "random Qwen2", f"{random.num_parameters():,} parameters, vocabulary {here.size.vocabulary:,}"


# ---- correctness -----------------------------------------------------------------------------------------------------


def _verdict(value: float, bound: float) -> str:
    """NaN fails, too."""
    return (
        f"ok, {value:.1e} < {bound:g}" if value < bound else f"failed: {value:.1e}, where less than {bound:g} is right"
    )


def _policy(here: Here, model: str, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from rlalign.models.policy import Policy, PolicyConfig, locate_model

    tokenizer = AutoTokenizer.from_pretrained(locate_model(model), padding_side="left")
    return Policy(PolicyConfig(model, **options)).to(here.device), tokenizer


def _requests(here: Here, tokenizer: Any, prompts: int = 2, group: int = 4) -> list[Any]:
    from rlalign.rollouts.sampling.base import SampleRequest
    from rlalign.rollouts.template import render_prompt

    asked = [tuple(render_prompt(tokenizer, text)[0]) for text in workload.questions(prompts, here.size.case)]
    return [SampleRequest(ids, number, sample, 0) for number, ids in enumerate(asked) for sample in range(group)]


def _autocast(here: Here, bf16: bool) -> Any:
    return torch.autocast(here.device, torch.bfloat16, enabled=bf16)


@torch.no_grad()
def _sampled_and_scored(here: Here, packed: bool, bf16: bool) -> tuple[Any, Any, Any]:
    """Log-probabilities of sampled tokens by the sampler and by the policy, and which are tokens."""
    from torch.nn.utils.rnn import pad_sequence

    from rlalign.rollouts.sampling.base import SamplingParams
    from rlalign.rollouts.sampling.local import LocalSampler

    policy, tokenizer = _policy(here, "embedded")
    requests = _requests(here, tokenizer)
    sampler = LocalSampler(packed=packed)
    sampler.setup(tokenizer)
    sampler.sync(policy)
    with _autocast(here, bf16):
        drawn = sampler.sample(requests, SamplingParams(max_new_tokens=24))
        prompts = pad_sequence([torch.tensor(request.prompt_ids) for request in requests], True, 0, "left")
        real = pad_sequence([torch.ones(len(request.prompt_ids)) for request in requests], True, 0, "left").bool()
        tokens = pad_sequence([torch.tensor(completion.token_ids) for completion in drawn], True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([[len(completion.token_ids)] for completion in drawn])
        sampled = pad_sequence([torch.tensor(completion.logprobs) for completion in drawn], True)
        batch = [torch.cat([prompts, tokens], 1), torch.cat([real, mask], 1), mask]
        scored = policy(*(part.to(here.device) for part in batch)).logprobs.cpu()
    return sampled, scored, mask


@torch.no_grad()
def _decoders_apart(here: Here, model: str) -> float:
    """Log-probabilities of the two decoders, over prompts and a few steps, in float32."""
    from rlalign.models.decoding import ModuleDecoder
    from rlalign.models.packed import PackedDecoder

    policy, tokenizer = _policy(here, model)
    prompts = [request.prompt_ids for request in _requests(here, tokenizer, group=1)]
    decoders = [PackedDecoder(policy.model, torch.float32), ModuleDecoder(policy.model, 0)]
    apart = 0.0
    logits = [decoder.admit(prompts, [2] * len(prompts)) for decoder in decoders]
    for _ in range(6):
        one, other = (each.log_softmax(-1) for each in logits)
        apart = max(apart, float((one - other).abs().max()))
        tokens = other.argmax(-1)
        logits = [decoder.step(tokens) for decoder in decoders]
    return apart


@torch.no_grad()
def _sharing_apart(here: Here) -> float:
    """Scores of rows whose prompts are computed once, against those of whole rows; relative to the largest."""
    from rlalign.models.scoring import token_scores

    policy, tokenizer = _policy(here, "embedded")
    rows = [request.prompt_ids for request in _requests(here, tokenizer)]
    padded = tokenizer.pad({"input_ids": [list(ids) for ids in rows]}, return_tensors="pt", padding_side="left")
    torch.manual_seed(0)
    tokens = torch.randint(5, 250, (len(rows), 12))
    ids, real = torch.cat([padded["input_ids"], tokens], 1), torch.cat([padded["attention_mask"] > 0, tokens > 0], 1)
    parts = [part.to(here.device) for part in (ids, real, tokens > 0)]
    shared, whole = (token_scores(policy.model, *parts, share_prompts=share).logprobs for share in (True, False))
    return float((shared - whole).abs().max() / whole.abs().max())


def _cut_apart(here: Here) -> float:
    """How far two SGD steps are apart that differ in how they are cut into minibatches, over how far they go."""
    import lightning
    from ours import prepare

    start = torch.cat([p.detach().flatten().cpu() for p in _policy(here, "embedded")[0].model.parameters()])
    ends = []
    for rows in (8, 2):
        how: dict[str, Any] = {"prompts": 2, "group": 4, "device": here.device, "forced": False, "sgd": True}
        lightning.seed_everything(0, verbose=False)
        options = [f"minibatch_size={rows}"]
        trainer, module, data = prepare("embedded", workload.Case("", 12), 1, "fp32", options, **how)
        trainer.fit(module, data)
        ends.append(torch.cat([p.detach().flatten().cpu() for p in module.policy.model.parameters()]))
    went = (ends[0] - start).norm()
    return float((ends[0] - ends[1]).norm() / went) if went else float("nan")


def correctness(here: Here) -> Iterator[Row]:
    """What has to agree."""
    for name, model in (("random", here.model), ("embedded", "embedded")):
        yield f"float32: packed decoder = modules, {name}", _verdict(_decoders_apart(here, model), 1e-3)
    for packed in (False, True):
        name = "packed decoder" if packed else "modules"
        sampled, scored, mask = _sampled_and_scored(here, packed, bf16=False)
        yield f"float32: sampled = scored, {name}", _verdict(float((sampled - scored)[mask].abs().max()), 1e-3)
        sampled, scored, mask = _sampled_and_scored(here, packed, bf16=True)
        yield f"bf16: sampled = scored, {name}, mean", _verdict(float((sampled - scored)[mask].abs().mean()), 0.05)
    yield "float32: shared prompts = whole rows", _verdict(_sharing_apart(here), 1e-5)
    yield "float32: a step cut into 1 = into 4", _verdict(_cut_apart(here), 1e-3)


# ---- steps -----------------------------------------------------------------------------------------------------------


def step(here: Here, **policy: Any) -> Iterator[Row]:
    """Whole steps of GRPO in bf16-mixed; the first one does not count."""
    from ours import prepare

    from rlalign.callbacks.performance import Performance

    seen: list[dict[str, float]] = []

    class Kept(Performance):
        """Keeps the figures of every iteration."""

        def measured(self, *args: Any) -> dict[str, float]:
            """What is logged."""
            seen.append(super().measured(*args))
            return seen[-1]

    size = here.size
    options = [f"minibatch_size={size.rows}", *(f"{name}={value!r}" for name, value in policy.items())]
    how = {"prompts": size.prompts, "group": size.group, "device": here.device, "callbacks": [Kept()]}
    trainer, module, data = prepare(here.model, size.case, size.steps, "bf16", options, **how)
    trainer.fit(module, data)
    of = {name: statistics.median(figures[name] for figures in seen[1:]) for name in seen[0]}
    sampling = of["sample_share"] * of["iteration_seconds"]
    yield "seconds a step", f"{of['iteration_seconds']:.2f}, {sampling:.2f} of them sampling"
    yield (
        "tokens/s",
        f"{size.responses * size.tokens / sampling:,.0f} sampled, {of['trained_tokens_per_second']:,.0f} trained",
    )
    yield "MFU of the update", f"{of['mfu']:.1%} ({of['tflops']:.3g} TFLOP/s)"
    yield "peak memory", f"{workload.peak_gb():.2f} GB"


def sampling(here: Here) -> Iterator[Row]:
    """The local sampler, by modules and by the packed decoder, against ``generate`` of transformers."""
    from forced import ToLength
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    from rlalign.rollouts.sampling.base import SamplingParams

    size, case = here.size, here.size.case
    policy, tokenizer = _policy(here, here.model)
    requests = _requests(here, tokenizer, size.prompts, size.group)
    total = size.responses * size.tokens

    def ours(sampler: Any) -> None:
        with _autocast(here, bf16=True):
            drawn = sampler.sample(requests, SamplingParams(max_new_tokens=size.tokens))
        assert sum(len(completion.token_ids) for completion in drawn) == total

    for name, packed in (("modules", False), ("packed", True)):
        sampler = ToLength(case, packed=packed)
        sampler.setup(tokenizer)
        sampler.sync(policy)
        yield f"rlalign, {name}", _speed(here, total, partial(ours, sampler))
        sampler.release()
    theirs = AutoModelForCausalLM.from_pretrained(here.model, dtype=torch.bfloat16).to(here.device)
    padded = tokenizer.pad({"input_ids": [list(request.prompt_ids) for request in requests]}, return_tensors="pt")

    @torch.no_grad()
    def generate() -> None:
        lengths = LogitsProcessorList([workload.Lengths(case, tokenizer.eos_token_id)])
        how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "logits_processor": lengths}
        ends = {"max_new_tokens": size.tokens, "pad_token_id": tokenizer.pad_token_id}
        theirs.generate(**padded.to(here.device), **how, **ends)

    yield "transformers generate", f"{_speed(here, total, generate)} (weights in bfloat16)"


def _speed(here: Here, tokens: int, run: Callable[[], None]) -> str:
    """Of the second call."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        run()
        if here.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"


def trl(here: Here) -> Iterator[Row]:
    """TRL's GRPOTrainer on the same work."""
    try:
        import trl as _  # noqa: F401
    except ImportError as error:
        yield "TRL", f"not installed ({error})"
        return
    size = here.size
    workload.CASES["here"], workload.DEVICE = size.case, here.device
    workload.PROMPTS, workload.GROUP, workload.ROWS = size.prompts, size.group, size.rows
    import peer_trl

    sys.argv = ["peer_trl.py", here.model, "here", str(size.steps), "bf16"]
    said = io.StringIO()
    with redirect_stdout(said):
        peer_trl.main()
    lines = [line.split() for line in said.getvalue().splitlines()]
    seconds = [float(line[1]) for line in lines if line[:1] == ["step"]]
    yield "seconds a step", f"{statistics.median(seconds[1:]):.2f} (weights in bfloat16)"
    yield "peak memory", f"{workload.peak_gb():.2f} GB"


def learning(here: Here) -> Iterator[Row]:
    """The quickstart: the embedded model learns arithmetic."""
    from rlalign.cli.trainer import TrainerCLI

    configs = [f"--config={ROOT / 'configs' / name}" for name in ("base.yaml", "tiny/grpo.yaml")]
    common = [*configs, "--run=check", f"--trainer.accelerator={here.device}", *here.size.learning]
    quiet = ["--trainer.enable_progress_bar=false"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        scores = []
        for command, more in (("validate", []), ("fit", []), ("validate", ["--ckpt_path=last"])):
            began = time.perf_counter()
            with redirect_stdout(io.StringIO()):
                cli = TrainerCLI([command, *common, *quiet, *more])
            if command == "fit":
                seconds = time.perf_counter() - began
            else:
                scores.append(float(cli.trainer.callback_metrics["val/pass@1"]))
        os.chdir(ROOT)
    yield "pass@1 of the quickstart", f"{scores[0]:.2f} -> {scores[1]:.2f} in {seconds:.0f} s"


SECTIONS: dict[str, Callable[[Here], Iterator[Row]]] = {
    "machine": machine,
    "model": model,
    "correctness": correctness,
    "step": step,
    "sampling": sampling,
    "trl": trl,
    "learning": learning,
    "lora": partial(step, lora_rank=16),
    "whole_rows": partial(step, share_prompts=False),
    "checkpointing": partial(step, activation_checkpointing=True),
}


def main(section: str, device: str, size: str, model: str) -> None:
    """Print the rows of a section."""
    warnings.filterwarnings("ignore")
    for what, value in SECTIONS[section](Here(device, SIZES[size], model)):
        print(f"row\t{what}\t{value}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
