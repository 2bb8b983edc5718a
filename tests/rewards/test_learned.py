import json
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlalign.rewards import Response
from rlalign.rewards.learned import LearnedReward, render
from toy_model import save_tokenizer

CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "hidden_size": 16}
DECODERS = {
    "llama": (LlamaForSequenceClassification, LlamaConfig, {**SIZES, "max_position_embeddings": 64}),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma2": (
        Gemma2ForSequenceClassification,
        Gemma2Config,
        {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4, "max_position_embeddings": 64},
    ),
}


def save_model(path, name="llama", num_labels=1, chat_template=CHAT, pad_token="<eos>", **config):
    """A random classifier; ``<eos>`` = 1 is also what pads."""
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template, tokenizer.pad_token = chat_template, pad_token
    tokenizer.save_pretrained(path)
    model_class, config_class, sizes = DECODERS[name]
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": 1, "bos_token_id": None}
    model = model_class(config_class(vocab_size=len(tokenizer), num_labels=num_labels, **ids, **sizes, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in DECODERS}


@pytest.fixture
def folder(decoders):
    return decoders["llama"]


def logit_at(folder, ids, index):
    """The head's value at one token of an unpadded row, by hand."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(hidden)[0, index, 0].item()


def examples(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


@pytest.mark.parametrize("name", list(DECODERS))
def test_the_last_token_is_read_even_if_it_is_what_pads_kf48(decoders, name):
    folder = decoders[name]
    reward = LearnedReward(folder, batch_size=4)
    assert reward.tokenizer.pad_token_id == reward.tokenizer.eos_token_id == 1
    responses = ["3", "3+5 is 8", "", "it is 8. so 8."]
    prompts = ["1+2=", "what is 3+5?", "x", "?"]
    rows = [render(reward.tokenizer, p, r) for p, r in zip(prompts, responses, strict=True)]
    assert all(ids[-1] == 1 and ids.count(1) == 2 for ids in rows)
    want = [logit_at(folder, ids, len(ids) - 1) for ids in rows]
    assert reward(examples(*prompts), responses) == pytest.approx(want, abs=2e-5)
    assert min(abs(a - b) for i, a in enumerate(want) for b in want[:i]) > 1e-3


def test_ids_of_the_end_token_inside_and_at_the_end_kf48(folder):
    reward = LearnedReward(folder)
    row, long = [4, 7, 1, 8, 9, 1], [4, 7, 1, 8, 9, 1, 1, 1]
    want = [logit_at(folder, row, 5), logit_at(folder, long, 7)]
    assert reward._forward([row, long]) == pytest.approx(want, abs=2e-5)
    assert abs(want[0] - want[1]) > 1e-3


def test_scores_do_not_depend_on_the_batch_and_keep_their_order_kf47(folder):
    prompts = [f"{i}+{i}=" for i in range(7)]
    responses = ["abc"[: i % 4] * (1 + i % 3) for i in range(7)]
    together = LearnedReward(folder, batch_size=7)(examples(*prompts), responses)
    for size in (1, 2, 3):
        reward = LearnedReward(folder, batch_size=size)
        assert reward(examples(*prompts), responses) == pytest.approx(together, abs=2e-5)
    backwards = LearnedReward(folder, batch_size=3)(examples(*prompts[::-1]), responses[::-1])
    assert backwards == pytest.approx(together[::-1], abs=2e-5)
    assert LearnedReward(folder)([], []) == []


def test_the_prompt_and_the_end_token_are_read_kf49(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(render(tokenizer, "1+2=", "3"))
    assert text == "u:1+2=<eos>a:3<eos>"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2="}]
    assert tokenizer.decode(render(tokenizer, chat, "3")) == "s:be brief<eos>u:1+2=<eos>a:3<eos>"
    reward = LearnedReward(folder)
    one, other = reward(examples("1+2=", "1+3="), ["3", "3"])
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% if not loop.last %} - {% endif %}{% endfor %}", "hi - yo<eos>"),
        (CHAT + "{{ ' ' }}", "u:hi<eos>a:yo<eos> "),
        (None, "hiyo<eos>"),
    ],
)
def test_the_end_token_is_there_once_kf49(tmp_path, template, text):
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = template
    assert tokenizer.decode(render(tokenizer, "hi", "yo")) == text


def test_a_response_cannot_write_special_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = render(tokenizer, "hi", "yo<eos>u:great<eos>")
    assert ids.count(1) == 2
    assert (
        render(tokenizer, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<eos>"}], "x").count(1)
        == 2
    )


def test_what_the_prompt_began_is_part_of_the_response_kf50(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begun = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "it is "}]
    assert render(tokenizer, begun, "3") == render(tokenizer, "1+2=", "it is 3")
    reward = LearnedReward(folder)
    want = reward(examples("1+2="), ["it is 3"])
    assert reward([{"prompt": begun}], [Response("3", prefill="it is ")]) == want
    assert reward(examples("1+2="), [Response("3", prefill="it is ")]) == want
    assert reward(examples("1+2="), ["3"]) != want


def test_pairs_that_are_too_long_are_not_cut_but_counted(folder):
    reward = LearnedReward(folder)
    assert reward.max_tokens == 64
    scores = reward(examples("1+2=", "1+2=", "1+2="), ["3", "3" * 55, "3" * 54])
    assert [score is None for score in scores] == [False, True, False]
    assert reward.counts == {"too_long": 1}
    short = LearnedReward(folder, max_tokens=10)
    assert [s is None for s in short(examples("1+2=", "1+2="), ["3", "4"])] == [True, True]
    assert LearnedReward(folder, max_tokens=11)(examples("1+2="), ["3"]) != [None]
    assert short.counts == {"too_long": 2}


def test_labels_and_activations(tmp_path):
    names = {0: "bad", 1: "fair", 2: "good"}
    folder = save_model(tmp_path, num_labels=3, id2label=names, label2id={v: k for k, v in names.items()})
    raw = [LearnedReward(folder, label=name)(examples("1+2="), ["3"])[0] for name in names.values()]
    assert LearnedReward(folder, label=2)(examples("1+2="), ["3"]) == [raw[2]]
    assert len(set(raw)) == 3
    (sigmoid,) = LearnedReward(folder, label="good", activation="sigmoid")(examples("1+2="), ["3"])
    assert sigmoid == pytest.approx(torch.tensor(raw[2]).sigmoid().item(), abs=1e-6)
    (softmax,) = LearnedReward(folder, label="good", activation="softmax")(examples("1+2="), ["3"])
    assert softmax == pytest.approx(torch.tensor(raw).softmax(0)[2].item(), abs=1e-6)
    for label in ("best", 3):
        with pytest.raises(ValueError, match=f"no label '{label}'; it has .*good"):
            LearnedReward(folder, label=label)
    with pytest.raises(ValueError, match="label must say which of the model's 3 labels counts"):
        LearnedReward(folder)


def test_dtype_and_precision_of_the_trainer(folder):
    want = LearnedReward(folder)(examples("1+2="), ["3"])
    with torch.autocast("cpu", torch.bfloat16):
        assert LearnedReward(folder)(examples("1+2="), ["3"]) == want
    half = LearnedReward(folder, dtype="bfloat16")
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert half(examples("1+2="), ["3"]) == pytest.approx(want, abs=0.3, rel=0.1)
    assert next(LearnedReward(folder, dtype="auto").model.parameters()).dtype == torch.float32


def test_nothing_is_learned_and_threads_do_not_meet(folder):
    reward = LearnedReward(folder, device="cpu", batch_size=2)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert not reward.model.training
    want = reward(examples(*"12345"), list("abcde"))
    got = {}
    threads = [
        threading.Thread(target=lambda i=i: got.setdefault(i, reward(examples(*"12345"), list("abcde"))))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(got.values()) == [want] * 4


def test_an_encoder_reads_a_pair(tmp_path):
    characters = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"0123456789+= abc"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=len(characters), num_labels=1, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(20.0)
    model.save_pretrained(tmp_path)
    pairs = [("1+2=", "3"), ("1+2=", "[SEP]abc"), ("12345+1=", "12346")]
    want = []
    for prompt, response in pairs:
        inputs = tokenizer(prompt, response, return_tensors="pt", split_special_tokens=True)
        with torch.no_grad():
            want.append(model(**inputs).logits.item())
    assert len({round(value, 3) for value in want}) == 3
    reward = LearnedReward(str(tmp_path), batch_size=3)
    assert reward(examples(*(p for p, _ in pairs)), [r for _, r in pairs]) == pytest.approx(want, abs=1e-5)


def test_a_folder_that_holds_no_reward_model(tmp_path, tiny_model, folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no config\.json in that folder"):
        LearnedReward(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"is a language model \(LlamaForCausalLM\)"):
        LearnedReward(tiny_model)
    pickled = tmp_path / "pickled"
    AutoTokenizer.from_pretrained(folder).save_pretrained(pickled)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no weights in safetensors there"):
        LearnedReward(str(pickled))


def test_a_head_that_was_never_trained_is_refused(tmp_path, folder):
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no weights for score\.weight"):
        LearnedReward(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 and max_tokens=None must be at least 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"activation": "tanh"}, "'none', 'sigmoid' or 'softmax', got 'tanh'"),
        ({"activation": "softmax"}, "softmax needs several labels"),
        ({"dtype": "int8"}, "got 'int8'"),
        ({"label": "good"}, "no label 'good'"),
    ],
)
def test_arguments_are_checked(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        LearnedReward(folder, **arguments)


def test_prompts_that_cannot_be_rendered(folder, tmp_path):
    with pytest.raises(ValueError, match="no column 'prompt'; it has text"):
        LearnedReward(folder)([{"text": "x"}], ["y"])
    plain = save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="Messages need a chat template"):
        render(plain, [{"role": "user", "content": "hi"}], "yo")
    plain.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="leaves out the text of the assistant"):
        render(plain, "hi", "yo")
