"""A reward that a model has learned: a sequence classifier of transformers."""

import inspect
import json
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlalign.assets import told_if_missing
from rlalign.rewards.base import BatchedReward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "\u2603response\u2603"
_NEVER = -1  # an id that no token has


class LearnedReward(BatchedReward):
    """What a reward model says of the prompt with the response: its one score, or the logit of one of its labels.

    Prompt and response are rendered by :func:`render`, with the chat template of the model's own tokenizer. The data's
    prompt is rendered, without the ``system_prompt`` that the data module adds. What the prompt put into the
    assistant's mouth belongs to the response. A pair that is longer than ``max_tokens`` is never cut: it gets ``None``
    and is counted (``too_long``).

    Weights are read from safetensors only, and code that comes with them is not run. The model computes apart from the
    trainer's precision, in ``dtype``; scores do not depend on what else is in a batch, but for rounding.

    Args:
        model: Folder that ``save_pretrained`` wrote, tokenizer included, or a name on the Hugging Face hub.
        label: Name or number of the label whose logit counts; a model with one score needs none.
        activation: Of the score: ``none``, ``sigmoid``, or ``softmax`` over the labels.
        max_tokens: Longest pair; by default the positions that the model has.
        batch_size: Pairs a forward pass.
        device: ``auto`` takes the rank's GPU where there is one; else a device of torch, ``cpu`` or ``cuda:1``, say.
        dtype: Of the weights: ``float32``, ``bfloat16``, ``float16``, or ``auto``, as they were saved.

    Attributes:
        counts: ``too_long`` so far.

    Raises:
        FileNotFoundError: If the folder holds no model, or no weights in safetensors.
        ValueError: If an argument is out of range, the model has no head that was trained, or the label is unknown.
    """

    columns = ("prompt",)

    def __init__(
        self,
        model: str,
        label: str | int | None = None,
        activation: Literal["none", "sigmoid", "softmax"] = "none",
        max_tokens: int | None = None,
        batch_size: int = 8,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"batch_size={batch_size} and max_tokens={max_tokens} must be at least 1.")
        if activation not in ("none", "sigmoid", "softmax"):
            raise ValueError(f"activation must be 'none', 'sigmoid' or 'softmax', got '{activation}'.")
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got '{dtype}'.")
        self.name, self.activation, self.batch_size, self.device = model, activation, batch_size, device
        self.model, self.tokenizer = _load(model, dtype)
        config = self.model.config
        self.label = _label_index(label, config)
        if activation == "softmax" and config.num_labels < 2:
            raise ValueError(f"activation=softmax needs several labels, and '{model}' has one score.")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        longest = min(positions or math.inf, self.tokenizer.model_max_length)
        self.max_tokens = max_tokens or (int(longest) if longest < 1e9 else None)
        self.counts: Counter[str] = Counter()
        self._inputs = set(inspect.signature(self.model.forward).parameters) & {"position_ids"}
        self._inputs |= {"token_type_ids"} & set(self.tokenizer.model_input_names)
        self._lock = threading.Lock()
        self._ready = False

    def __call__(self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> list[float | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            ValueError: If an example has no prompt, or one that the tokenizer cannot render.
        """
        with self._lock:  # for the tokenizer, too, which keeps the options of a call
            pairs = [self._ids(example, response) for example, response in zip(examples, responses, strict=True)]
            fitting = [i for i, ids in enumerate(pairs) if self.max_tokens is None or len(ids) <= self.max_tokens]
            self.counts["too_long"] += len(pairs) - len(fitting)
            fitting.sort(key=lambda i: len(pairs[i]))
            scores: list[float | None] = [None] * len(pairs)
            for start in range(0, len(fitting), self.batch_size):
                chosen = fitting[start : start + self.batch_size]
                for i, score in zip(chosen, self._forward([pairs[i] for i in chosen]), strict=True):
                    scores[i] = score
        return scores

    def _ids(self, example: Mapping[str, Any], response: str) -> list[int]:
        if "prompt" not in example:
            raise ValueError(f"The example has no column 'prompt'; it has {', '.join(example)}.")
        prompt, prefill = example["prompt"], getattr(response, "prefill", "")
        if not isinstance(prompt, str) and prompt and prompt[-1].get("role") == "assistant":
            prefill = ""  # it is in the prompt, which the response continues
        return render(self.tokenizer, prompt, prefill + str(response))

    def _forward(self, batch: list[list[int]]) -> list[float]:
        import torch

        device = self._device()
        width = max(map(len, batch))
        # Decoders are read at their last token. With the padding on the left that is the last column of every row, and
        # an id that no token has stands for padding in the configuration, where transformers looks for it.
        left = self._reads_last_token
        pad_id = 0 if left else (self.tokenizer.pad_token_id or 0)
        input_ids = torch.full((len(batch), width), pad_id)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for row, ids in enumerate(batch):
            place = slice(width - len(ids), width) if left else slice(0, len(ids))
            input_ids[row, place] = torch.tensor(ids)
            mask[row, place] = 1
        inputs = {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}
        if left and "position_ids" in self._inputs:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0).to(device)
        if not left and "token_type_ids" in self._inputs and self.tokenizer.sep_token_id is not None:
            ends = (input_ids == self.tokenizer.sep_token_id) & mask.bool()
            second = (ends.cumsum(-1) - ends.long() > 0) & mask.bool()
            inputs["token_type_ids"] = second.long().to(device)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            logits: Tensor = self.model(**inputs).logits.float()
        if self.activation == "softmax":
            logits = logits.softmax(-1)
        elif self.activation == "sigmoid":
            logits = logits.sigmoid()
        return [float(value) for value in logits[:, self.label].cpu()]

    @property
    def _reads_last_token(self) -> bool:
        """Whether the model is a decoder with a head named ``score``, as transformers has them; else an encoder."""
        return hasattr(self.model, "score")

    def _device(self) -> Any:
        """Where the model is, moved there when first asked: only then has every rank its own GPU."""
        import torch

        if not self._ready:
            if self.device == "auto":
                device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            else:
                device = torch.device(self.device)
            self.model.to(device)
            if self._reads_last_token:
                self.model.config.get_text_config().pad_token_id = _NEVER
            self._ready = True
        return self.model.device


def render(tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Mapping[str, Any]], response: str) -> list[int]:
    """Token ids of a prompt with a response, as a reward model reads them: the one formatter of training and scoring.

    With a chat template: the conversation as the template writes it, the response being the assistant's text (or the
    rest of it, if the prompt ends in a message of the assistant), then the end token unless the template wrote one.
    The response is data: text in it that looks like a special token is tokenised as text. Without a template: a pair of
    texts, where the tokenizer knows how to write pairs (BERT's and its kin), else prompt, response and end token.

    Args:
        tokenizer: Of the reward model.
        prompt: Text, or messages.
        response: Text.

    Raises:
        ValueError: If messages meet a tokenizer without template, the template leaves out the response, or there is no
            end token.
    """
    from rlalign.rollouts.template import clean_messages, encode, end_token_ids

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else clean_messages(prompt)
    begun = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    reply = begun + response
    if not tokenizer.chat_template:
        if not isinstance(prompt, str):
            raise ValueError("Messages need a chat template, and the reward model's tokenizer has none.")
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return list(tokenizer(prompt, reply, split_special_tokens=True)["input_ids"])
        if tokenizer.eos_token_id is None:
            raise ValueError("The reward model's tokenizer has neither a chat template nor an end token.")
        return [*tokenizer(prompt)["input_ids"], *_encode_as_text(tokenizer, reply), tokenizer.eos_token_id]
    messages.append({"role": "assistant", "content": _SENTINEL})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    before, found, after = text.rpartition(_SENTINEL)
    if not found:
        raise ValueError("The reward model's chat template leaves out the text of the assistant.")
    ending = encode(tokenizer, after)
    if tokenizer.eos_token_id is not None and not end_token_ids(tokenizer) & set(ending):
        ending = [*ending, tokenizer.eos_token_id]
    return [*encode(tokenizer, before), *_encode_as_text(tokenizer, reply), *ending]


def _encode_as_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Ids of text in which nothing is a special token, whatever it looks like."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _load(name: str, dtype: str) -> tuple[Any, Any]:
    """A sequence classifier in evaluation mode, on the CPU, and its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(name).expanduser()
    if folder.is_dir() or name.startswith((".", "/", "~")):
        name = str(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model={name}: no config.json in that folder; give one that save_pretrained wrote."
            )
        if not any(folder.glob("*.safetensors")):
            raise FileNotFoundError(
                f"model={name}: no weights in safetensors there, and no other format is read, since pickled weights "
                "can run code: save the model with save_pretrained of transformers."
            )
        kind = (json.loads((folder / "config.json").read_text()).get("architectures") or [""])[0]
        if kind.endswith(("ForCausalLM", "LMHeadModel")):
            raise ValueError(f"model={name} is a language model ({kind}): a reward model is a sequence classifier.")
    with told_if_missing(name):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model={name} has no weights for {', '.join(missing[:3])}: it is no trained classifier.")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return model.eval().requires_grad_(False), tokenizer


def _label_index(label: str | int | None, config: Any) -> int:
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if label is None:
        if config.num_labels > 1:
            raise ValueError(f"label must say which of the model's {config.num_labels} labels counts: {names}.")
        return 0
    matching = [number for number, name in names.items() if label in (number, name)]
    if len(matching) != 1:
        raise ValueError(f"The model has no label '{label}'; it has {names}.")
    return matching[0]
