from types import SimpleNamespace

import pytest
import torch
from toy_tokenizers import NO_END, SMOLLM2, THINKING, WITH_BOS, toy_tokenizer

from rlalign.rollouts.template import (
    decode_response,
    end_token_ids,
    render_demonstration,
    render_prompt,
    response_mask_from_ids,
)

USER = {"role": "user", "content": "What is 2+2?"}


def text(tokenizer, ids):
    return tokenizer.decode(ids)


def test_string_becomes_a_user_message_where_there_is_a_template():
    tokenizer = toy_tokenizer()
    ids, prefill = render_prompt(tokenizer, "What is 2+2?")
    assert text(tokenizer, ids) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prefill == ""
    assert ids == render_prompt(tokenizer, [USER])[0] == render_prompt(tokenizer, "What is 2+2?", None, "chat")[0]
    assert text(tokenizer, render_prompt(tokenizer, "What is 2+2?", None, "plain")[0]) == "What is 2+2?"


def test_no_template():
    tokenizer = toy_tokenizer(None, bos=True)
    assert text(tokenizer, render_prompt(tokenizer, "hello")[0]) == "<s>hello"
    with pytest.raises(ValueError, match="chat template, and this tokenizer has none"):
        render_prompt(tokenizer, [USER])
    with pytest.raises(ValueError, match="chat template, and this tokenizer has none"):
        render_prompt(tokenizer, "hello", rendering="chat")
    with pytest.raises(ValueError, match="system_prompt needs a chat template"):
        render_prompt(tokenizer, "hello", system_prompt="Be kind")


def test_system_prompt_is_put_first_and_only_once():
    tokenizer = toy_tokenizer()
    ids, _ = render_prompt(tokenizer, "hello", system_prompt="Be kind")
    assert text(tokenizer, ids).startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhello")
    with pytest.raises(ValueError, match="system message of its own"):
        render_prompt(tokenizer, [{"role": "system", "content": "x"}, USER], system_prompt="Be kind")


def test_chat_has_one_bos_kf37():
    tokenizer = toy_tokenizer(WITH_BOS, bos=True)
    ids, _ = render_prompt(tokenizer, [USER])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer(text(tokenizer, ids))["input_ids"].count(tokenizer.bos_token_id) == 2  # what must not be done
    ids, _ = render_demonstration(tokenizer, [USER], "4")
    assert ids.count(tokenizer.bos_token_id) == 1


def test_null_content_renders_as_nothing_kf94():
    tokenizer = toy_tokenizer()
    ids, _ = render_prompt(tokenizer, [{"role": "user", "content": None, "tool_calls": None}])
    assert "<|im_start|>user\n<|im_end|>" in text(tokenizer, ids)


def test_content_parts_are_joined_and_other_media_refused():
    tokenizer = toy_tokenizer()
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    assert render_prompt(tokenizer, [{"role": "user", "content": parts}]) == render_prompt(tokenizer, [USER])
    with pytest.raises(ValueError, match="Message 1 has parts that are not text"):
        render_prompt(tokenizer, [{"role": "user", "content": [{"type": "image"}]}])
    for part in (None, "2+2", {"type": "text"}, {"type": "text", "text": None}):
        with pytest.raises(ValueError, match=r"Message 2 has parts that are not text, .* for one"):
            render_prompt(tokenizer, [USER, {"role": "user", "content": [parts[0], part]}])
    for content in (5, {"a": 1}, True):
        with pytest.raises(ValueError, match="Message 1 must have text as content, got"):
            render_prompt(tokenizer, [{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="Message 1 must be a mapping with role"):
        render_prompt(tokenizer, [{"content": "hello"}])


def test_prefill_of_the_template_is_found_kf50():
    tokenizer = toy_tokenizer(THINKING)
    ids, prefill = render_prompt(tokenizer, [USER])
    assert text(tokenizer, ids).endswith("<|im_start|>assistant\n<think>\n")
    assert prefill == "<think>\n"


def test_prefill_of_a_final_assistant_message_is_continued_kf50():
    tokenizer = toy_tokenizer()
    ids, prefill = render_prompt(tokenizer, [USER, {"role": "assistant", "content": "It is"}])
    assert text(tokenizer, ids).endswith("<|im_start|>assistant\nIt is")
    assert prefill == "It is"


def test_mask_without_generation_tags_kf44():
    tokenizer = toy_tokenizer(SMOLLM2)
    assert "generation %}" not in SMOLLM2
    ids, mask = render_demonstration(tokenizer, [USER], "4")
    learned = [i for i, on in zip(ids, mask, strict=True) if on]
    assert text(tokenizer, learned) == "4<|im_end|>"
    assert text(tokenizer, ids).endswith("<|im_start|>assistant\n4<|im_end|>\n")
    assert not mask[-1]  # the line break after the end token is never sampled


def test_mask_of_several_turns():
    tokenizer = toy_tokenizer()
    messages = [USER, {"role": "assistant", "content": "4"}, USER, {"role": "assistant", "content": "hello world"}]
    ids, mask = render_demonstration(tokenizer, messages)
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    runs = [text(tokenizer, [t for t, on in zip(ids[s:], mask[s:], strict=True) if on]) for s in starts]
    assert len(starts) == 2
    assert runs == ["4<|im_end|>hello world<|im_end|>", "hello world<|im_end|>"]
    assert text(tokenizer, ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_mask_is_not_taken_from_ids_kf38():
    # pad, eos and the end of every turn are one token, which is in the prompt as well
    tokenizer = toy_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, mask = render_demonstration(tokenizer, [USER], "4")
    ends = [on for i, on in zip(ids, mask, strict=True) if i == tokenizer.eos_token_id]
    assert ends == [False, False, True]


def test_first_turn_is_a_prefix_of_the_second_ones_input_kf45():
    tokenizer = toy_tokenizer()
    first = [USER, {"role": "assistant", "content": "\n4"}]  # a reply that would merge with the header's line break
    prompt, _ = render_prompt(tokenizer, [USER])
    one, _ = render_demonstration(tokenizer, first)
    two, _ = render_demonstration(tokenizer, [*first, USER, {"role": "assistant", "content": "4"}])
    end = len(one) - 1 - one[::-1].index(tokenizer.eos_token_id)
    assert one[: len(prompt)] == prompt
    assert two[: end + 1] == one[: end + 1]


def test_template_that_rewrites_history_is_refused_kf45():
    tokenizer = toy_tokenizer(THINKING)
    reply = {"role": "assistant", "content": "<think>\nwell</think>4"}
    render_demonstration(tokenizer, [USER, reply])
    with pytest.raises(ValueError, match="turn 2 of 4 differently once more is added"):
        render_demonstration(tokenizer, [USER, reply, USER, reply])


def test_template_without_end_token_is_refused():
    with pytest.raises(ValueError, match="no end token"):
        render_demonstration(toy_tokenizer(NO_END), [USER], "4")
    with pytest.raises(ValueError, match="no message of the assistant"):
        render_demonstration(toy_tokenizer(), [USER], [])


def test_prompt_and_response_are_tokenised_apart_kf46():
    for tokenizer in (toy_tokenizer(None), toy_tokenizer(None, bos=True)):
        ids, mask = render_demonstration(tokenizer, "3+1=", "4")
        prompt, _ = render_prompt(tokenizer, "3+1=")
        assert tokenizer("3+1=4")["input_ids"][: len(prompt)] != prompt  # together they would merge
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * 2
        assert text(tokenizer, ids[len(prompt) :]) == "4<|im_end|>"
    tokenizer = toy_tokenizer()
    prompt, _ = render_prompt(tokenizer, "x")
    ids, mask = render_demonstration(tokenizer, "x", "\ny")
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


def test_sampled_ids_are_not_what_their_text_encodes_to_kf41():
    tokenizer = toy_tokenizer()
    sampled = [*tokenizer("hel", add_special_tokens=False)["input_ids"], *tokenizer("lo")["input_ids"]]
    assert decode_response(tokenizer, [*sampled, tokenizer.eos_token_id]) == "hello"
    assert tokenizer("hello")["input_ids"] != sampled


def test_decoding_does_not_clean_up_spaces():
    tokenizer = toy_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True  # as some checkpoints' configuration has it
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert decode_response(tokenizer, tokenizer("a , b .")["input_ids"]) == "a , b ."


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([5, 6, 2, 2, 2], [1, 1, 1, 0, 0]),  # kf38: pad is eos
        ([5, 6, 7, 8, 9], [1, 1, 1, 1, 1]),  # kf39: never ended
        ([2, 2, 2, 2, 2], [1, 0, 0, 0, 0]),  # ended at once
        ([5, 2, 7, 2, 2], [1, 1, 0, 0, 0]),  # only the first end counts
    ],
)
def test_response_mask_up_to_and_with_the_first_end_kf39(ids, mask):
    assert response_mask_from_ids(torch.tensor([ids]), {2}).tolist() == [[bool(m) for m in mask]]


def test_response_mask_with_several_end_tokens_kf40():
    assert response_mask_from_ids(torch.tensor([[5, 106, 0, 0], [5, 1, 106, 0]]), {1, 106}).tolist() == [
        [True, True, False, False],
        [True, True, False, False],
    ]
    assert response_mask_from_ids(torch.zeros(2, 0, dtype=torch.long), {1}).shape == (2, 0)


def test_all_end_tokens_are_found_kf40():
    tokenizer = toy_tokenizer(eos="<|endoftext|>")  # the template ends turns with another token, as base models' do
    im_end, endoftext = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert end_token_ids(tokenizer) == {im_end, endoftext}
    several = SimpleNamespace(eos_token_id=[1, 106])
    assert end_token_ids(tokenizer, several, SimpleNamespace(eos_token_id=7)) == {im_end, endoftext, 1, 106, 7}
    assert end_token_ids(toy_tokenizer(None), SimpleNamespace(eos_token_id=None)) == {im_end}
    with pytest.raises(ValueError, match="no response would end"):
        end_token_ids(toy_tokenizer(None, eos=None), SimpleNamespace())
