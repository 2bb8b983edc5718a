import pytest

from rlalign.rewards.base import Response
from rlalign.rewards.choice import MultipleChoice, options_in

CITIES = {"answer": "C", "options": ["London", "Rome", "Paris", "Vitamin B"]}


def verdict(text, example=CITIES, **options):
    return MultipleChoice(**{"choices": "options", **options})(example, text)


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "c",
        "C.",
        "(C)",
        "(c)",
        "C)",
        "[C]",
        "**C**",
        "**(C)**",
        "C. Paris",
        "C) Paris",
        "(C) Paris.",
        "**C. Paris**",
        "C: Paris",
        "Paris",
        "paris.",
        "**Paris**",
        "Option C",
        "The answer is (C)",
        "The answer must be C.",
        "So the correct option should be C, since Paris is in France.",
        "#### C",
        "The answer is C.",
        "The answer is **C**.",
        "the answer is c",
        "The answer is C) Paris.",
        "The answer is Paris",
        "Answer: C",
        "**Answer:** C",
        "Answer: **C. Paris**",
        "ANSWER: C",
        "Final answer: C",
        "The final answer is $\\boxed{C}$.",
        "\\boxed{\\text{C}}",
        "\\boxed{\\textbf{(C)}}",
        "$\\boxed{\\mathrm{C}}$",
        "\\boxed{Paris}",
        "\\boxed{C. Paris}",
        "The correct option is C because France is a country.",
        "The correct choice is C since A is in England.\nThe answer is C.",
        "I choose C",
        "I would go with (C).",
        "So we pick C",
        "(C) is correct.",
        "C is the correct answer.",
        "**C** is the right option",
        "The answer is C, not B.",
        "The answer is (C) rather than (A).",
        "The answer is C, instead of B",
        "The answer is A.\nWait, that is wrong.\nThe answer is C.",
        "<think>A or B? The answer is B.</think> C",
        "<think>The answer is B</think>The answer is C",
        "The answer is B <answer>C</answer>",
        "<answer>(C) Paris</answer>",
        "A is in England, B in Italy.\n\nC",
        "A is in England, B in Italy.\n\n**C. Paris**",
        "London is no answer, so it must be (C).",
        "The answer is:\n\nC",
        "The answer is:\n**C) Paris**",
    ],
)
def test_the_right_option_however_it_is_written(text):
    assert verdict(text) == 1.0
    assert verdict(text, CITIES | {"answer": "A"}) == 0.0
    assert verdict(text, CITIES | {"answer": "B"}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "<answer></answer>",
        "A, B, C, D",
        "A B C D",
        "(A) (B) (C) (D)",
        "C or D",
        "The answer is C or D",
        "The answer is B, C",
        "The answer is (C) and (D).",
        "The answer is either C or A.",
        "Answer: ABCD",
        "Answer: C/D",
        "\\boxed{A} \\boxed{C}",
        "\\boxed{C, D}",
        "\\boxed{}",
        "The answer is C) London",
        "C. London",
        "I don't choose C",
        "I would never pick C",
        "The answer is anything but C",
        "I choose neither A nor C",
        "The answer is not C",
        "The answer is not (C).",
        "C is a nice letter, I think",
        "Compact discs",
        "Cairo",
        "The answer is Parisian",
        "Not Paris",
        "The answer is E",
        "I think it might be one of them (C) (D)",
        "<think>The answer is C",
        "Paris is a city in Texas.",
        "\\boxed{B} although the answer is C",
    ],
)
def test_what_names_no_single_option_is_wrong_kf66(text):
    assert verdict(text) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "A dog barks.",
        "The answer is a dog",
        "The answer is A dog",
        "A good question",
        "I think so",
        "The answer is I do not know",
    ],
)
def test_words_are_no_letters(text):
    example = {"answer": "A", "options": ["cat", "cow", "pig", "hen", "e", "f", "g", "h", "i"]}
    assert verdict(text, example) == 0.0
    assert verdict(text, example | {"answer": "I"}) == 0.0


def test_an_article_that_belongs_to_an_option_is_none_of_the_letters():
    example = {"answer": "B", "options": ["The dog", "A cat", "Vitamin A", "Both"]}
    assert verdict("The answer is A cat", example) == 1.0
    assert verdict("B. A cat", example) == 1.0
    assert verdict("The answer is (B) A cat.", example) == 1.0
    assert verdict("The answer is C. Vitamin A", example | {"answer": "C"}) == 1.0
    assert verdict("The answer is C. Vitamin A because it helps", example | {"answer": "C"}) == 1.0
    assert verdict("The answer is C. Vitamin A or B", example | {"answer": "C"}) == 0.0
    assert verdict("The answer is A because it barks", example | {"answer": "A"}) == 1.0


@pytest.mark.parametrize("gold", ["C", "c", "(C)", "C.", "Paris", " paris ", 2, 2.0, "2", "C) Paris", "so\n#### C"])
def test_forms_of_the_right_option(gold):
    example = CITIES | {"answer": gold}
    assert verdict("C", example) == 1.0
    assert verdict("B", example) == 0.0


@pytest.mark.parametrize(
    "gold", [None, "", "E", "Berlin", 4, -1, "7", float("nan"), True, "C) London", "²", "9" * 5000]
)
def test_a_right_option_that_cannot_be_told_scores_nothing_and_is_counted_kf65(gold):
    reward = MultipleChoice(choices="options")
    assert reward(CITIES | {"answer": gold}, "C") is None
    assert reward.counts == {"unparseable_gold": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"text": ["London", "Rome", "Paris"], "label": ["A", "B", "C"]},
        {"A": "London", "B": "Rome", "C": "Paris", "D": None},
        ["A) London", "B) Rome", "C) Paris"],
        ("London", "Rome", "Paris"),
    ],
)
def test_forms_of_options(options):
    example = {"answer": "C", "options": options}
    assert verdict("Paris", example) == 1.0
    assert verdict("(C) Paris", example) == 1.0
    assert verdict("Rome", example) == 0.0
    assert verdict("D", example) == 0.0


def test_options_labelled_by_numbers():
    example = {"answer": "2", "options": {"text": ["London", "Paris"], "label": ["1", "2"]}}
    assert verdict("The answer is 2.", example) == 1.0
    assert verdict("(2) Paris", example) == 1.0
    assert verdict("1", example) == 0.0


def test_numbers_as_options_are_meant_by_their_text():
    example = {"answer": "4", "options": ["3", "4", "5"]}
    assert verdict("B", example) == 1.0
    assert verdict("The answer is 4", example) == 1.0
    assert verdict("5", example) == 0.0


def test_two_options_with_one_text_are_no_answer():
    assert verdict("Paris", {"answer": "A", "options": ["Paris", "Paris"]}) == 0.0


def test_options_of_no_known_form_are_named():
    with pytest.raises(ValueError, match="Column 'options' must hold options: a list of texts"):
        verdict("C", {"answer": "C", "options": "London, Rome"})
    with pytest.raises(ValueError, match="no column 'options'; it has answer"):
        verdict("C", {"answer": "C"})


@pytest.mark.parametrize(
    "prompt",
    [
        "Capital of France?\nA) London\nB) Rome\nC) Paris",
        "Q: 1+1? A. 1\nOptions:\n(A) London\n(B) Rome\n(C) Paris\nAnswer with a letter.",
        "Example\nA. Oslo\nB. Bonn\nC. Bern\n\nCapital of France?\nA. London\nB. Rome\nC. Paris\nAnswer:",
        "Capital of France? (A) London (B) Rome (C) Paris",
        "Capital of France? A) London, B) Rome, C) Paris",
        [
            {"role": "system", "content": "A) x\nB) y"},
            {"role": "user", "content": "Which?\nA: London\nB: Rome\nC: Paris"},
        ],
    ],
)
def test_options_are_read_from_the_prompt(prompt):
    example = {"prompt": prompt, "answer": "C"}
    reward = MultipleChoice()
    assert reward(example, "Paris") == 1.0
    assert reward(example, "The answer is C. Paris") == 1.0
    assert reward(example, "Rome") == 0.0
    assert reward(example, "D") == 0.0
    assert reward(example | {"answer": "Paris"}, "C") == 1.0


def test_without_options_letters_count():
    assert options_in("What is a capital? A. is one.") == {}
    assert options_in("B) x\nC) y") == {}
    reward = MultipleChoice(letters="ABC")
    assert reward({"prompt": "Which?", "answer": "C"}, "It is (C)") == 1.0
    assert reward({"prompt": "Which?", "answer": "C"}, "It is (D)") == 0.0
    assert reward({"prompt": "Which?", "answer": "D"}, "D") is None


def test_the_prefill_counts_kf50():
    assert verdict(Response("C", prefill="The answer is (")) == 1.0
    assert verdict(Response("C", prefill="<think>")) == 0.0


def test_answer_for_a_vote():
    reward = MultipleChoice()
    assert [reward.answer(t) for t in ("The answer is (C)", "**C**", "A or B", "")] == ["C", "C", None, None]


def test_columns_and_arguments():
    assert MultipleChoice().columns == ("answer", "prompt")
    assert MultipleChoice("gold", choices="options").columns == ("gold", "options")
    for letters in ("A", "AAB", "abc", "A B"):
        with pytest.raises(ValueError, match="at least two different capitals"):
            MultipleChoice(letters=letters)


def test_long_hostile_text_is_read_in_linear_time():
    for piece in ("(A", "\\boxed{", "answer is ", "A) ", "**A** ", "[A] is correct ", "{" * 50, " ", "is ", "not A "):
        text = piece * (60_000 // len(piece))
        assert verdict(text) == 0.0
        options_in(text)
    for blank in (" ", "\n"):
        assert options_in("A) x" + blank * 60_000 + "y") == {}
