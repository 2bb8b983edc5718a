import pytest

from rlalign.rewards import FormatReward, Response


@pytest.mark.parametrize(
    "text",
    [
        "<think>a\nb</think>\n<answer>9</answer>",
        "\n<think>a</think>\n\n<answer>9</answer>\n",
        "<think>if a<b and b>c then think</think><answer>9</answer>",
        "<think>the thinker </thinking> answers</think><answer><b>9</b></answer>",
        "<think>9</think><answer>9 < 10</answer>",
    ],
)
def test_one_block_of_each_kf67(text):
    assert FormatReward()({}, text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><think>b</think><answer>9</answer>",
        "<think>a</think><answer>9</answer><answer>9</answer>",
        "<think>a</think><answer>9</answer><think>b</think>",
        "<think><think>a</think></think><answer>9</answer>",
        "<think>a<answer>8</answer></think><answer>9</answer>",
        "<think>a</think><answer>9<answer></answer></answer>",
        "<think>a<answer>b</think>9</answer>",
        "<think>a</think><answer><answer id=1>9</answer>",
        "<think>a</think><answer>8</ANSWER><ANSWER>9</answer>",
        "<think>a</think><answer>8</ answer>< answer>9</answer>",
        "<think>a</think><answer>8<answer/>9</answer>",
        "<think>a</think><answer>8</answer\n><answer >9</answer>",
        "<think style='x'>a</think><answer>9</answer>",
        "<THINK>a</THINK><answer>9</answer>",
        "< think>a</think><answer>9</answer>",
        "<think>a</think> so <answer>9</answer>",
        "so <think>a</think><answer>9</answer>",
        "<think>a</think><answer>9</answer>.",
        "<think></think><answer>9</answer>",
        "<think> \n\t</think><answer>9</answer>",
        "<think>a</think><answer></answer>",
        "<think>a</think><answer> </answer>",
        "<answer>9</answer><think>a</think>",
        "<think>a</think><answer>9",
        "<think>a<answer>9</answer>",
        "<think>a</think>9",
        "<answer>9</answer>",
        "think>a</think><answer>9</answer>",
        "<think></think>a",
        "9",
        "",
    ],
)
def test_anything_else_kf67(text):
    assert FormatReward()({}, text) == 0.0


@pytest.mark.parametrize("prefill", ["<think>", "<think>\n", "\n<think>\n", "<think>Let me see. "])
def test_a_prefilled_thinking_counts_once_kf50(prefill):
    rest = "a</think>\n<answer>9</answer>"
    assert FormatReward()({}, Response(rest, prefill=prefill)) == 1.0
    assert FormatReward()({}, Response("<think>" + rest, prefill=prefill)) == 0.0
    assert FormatReward()({}, rest) == 0.0


def test_tags_are_checked():
    for tags in ([], "think", ["think", ""]):
        with pytest.raises(ValueError, match="must be a list that names at least one block"):
            FormatReward(tags)
    with pytest.raises(ValueError, match="must be all different"):
        FormatReward(["think", "Think"])


def test_hostile_text_is_read_in_linear_time():
    for piece in ("<think ", "<answer></answer>", "</think> ", "<" + " " * 5000, "<think" + " " * 500, "/"):
        assert FormatReward()({}, "<think>" + piece * (60_000 // len(piece))) == 0.0
