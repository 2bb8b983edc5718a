import sys

import pytest

from rlalign.rewards import Response
from rlalign.rewards.language import LanguageReward
from rlalign.rewards.repetition import RepetitionPenalty

ENGLISH = "The quick brown fox jumps over the lazy dog and runs away."
FRENCH = "Le renard brun saute par-dessus le chien paresseux et court."
CHINESE = "敏捷的棕色狐狸跳过了那只懒惰的狗然后跑到森林里去了。"
RUSSIAN = "Быстрая коричневая лиса прыгает через ленивую собаку."


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("a b c d e", 0.0),
        ("a b a b a b", -0.5),  # aba bab aba bab: 2 of 4
        ("a a a a a", -2 / 3),
        ("A a\nA\t a", -0.5),
        ("a b", 0.0),
        ("", 0.0),
        ("a b c", 0.0),
    ],
)
def test_repetition_of_words(text, score):
    assert RepetitionPenalty(3)({}, text) == pytest.approx(score)
    assert RepetitionPenalty(3, penalty=0.1)({}, text) == pytest.approx(0.1 * score)


def test_repetition_of_characters_for_languages_without_space():
    loop = "我们我们我们"  # 2-grams: 我们 们我 我们 们我 我们
    assert RepetitionPenalty(2)({}, loop) == 0.0
    assert RepetitionPenalty(2, unit="characters")({}, loop) == pytest.approx(-3 / 5)
    assert RepetitionPenalty(2, unit="characters")({}, "我们 我\n们我们") == pytest.approx(-3 / 5)
    assert RepetitionPenalty(2, unit="characters")({}, CHINESE) == pytest.approx(0.0)


def test_the_prefill_is_no_repetition():
    assert RepetitionPenalty(1)({}, Response("a b", prefill="a a a a")) == 0.0


def test_arguments_of_the_repetition_penalty():
    for wrong in ({"ngram": 0}, {"penalty": 0}, {"penalty": -1.0}, {"penalty": float("nan")}):
        with pytest.raises(ValueError, match="ngram must be at least 1 and penalty above 0"):
            RepetitionPenalty(**wrong)
    with pytest.raises(ValueError, match="'words' or 'characters', got 'tokens'"):
        RepetitionPenalty(unit="tokens")


@pytest.mark.parametrize(
    ("language", "text"),
    [("en", ENGLISH), ("fr", FRENCH), ("zh", CHINESE), ("ru", RUSSIAN)],
    ids=["en", "fr", "zh", "ru"],
)
def test_text_of_one_language(language, text):
    assert LanguageReward(language)({}, text) == 1.0
    for other in {"en", "fr", "zh", "ru"} - {language}:
        assert LanguageReward(other)({}, text) == 0.0


def test_share_of_letters_by_sentence():
    letters = [sum(map(str.isalpha, text)) for text in (ENGLISH, FRENCH)]
    share = letters[0] / sum(letters)
    assert LanguageReward("en")({}, f"{ENGLISH} {FRENCH}") == pytest.approx(share)
    assert LanguageReward("fr")({}, f"{ENGLISH}\n{FRENCH}") == pytest.approx(1 - share)


def test_a_foreign_script_inside_a_sentence_is_noticed():
    mixed = "First we compute 结果 and then we are done with the whole proof."
    english = sum(c.isascii() and c.isalpha() for c in mixed)
    assert LanguageReward("en")({}, mixed) == pytest.approx(english / (english + 2))
    assert LanguageReward("zh")({}, f"{CHINESE}Hello") == pytest.approx(25 / 30)
    assert sum(map(str.isalpha, CHINESE)) == 25


@pytest.mark.parametrize(
    "extra",
    [
        "```python\nfor renard in chien: print('le chien paresseux court dans la rue')\n```",
        "`le_chien_paresseux_court_dans_la_rue = vrai`",
        "$le chien paresseux court dans la rue$",
        "$$le chien\nparesseux$$",
        "\\[ \\text{le chien paresseux court dans la rue} \\]",
        "\\( \\text{le chien paresseux court dans la rue} \\)",
        "x = 42 α β",
        "https://chien.fr/le-chien-paresseux-court-dans-la-rue",
        "<think></think>",
        "123 + 456 = 579",
    ],
)
def test_code_and_maths_have_no_language(extra):
    assert LanguageReward("en")({}, f"{ENGLISH}\n{extra}\n{ENGLISH}") == 1.0
    assert LanguageReward("zh")({}, f"{CHINESE}\n{extra}\n{CHINESE}") == 1.0
    assert LanguageReward("zh")({}, extra) == 1.0


def test_an_unclosed_block_is_no_code():
    assert LanguageReward("en")({}, f"```\n{FRENCH}") == 0.0
    assert LanguageReward("en")({}, f"```\n{FRENCH}\n{FRENCH}\n") == 0.0
    assert LanguageReward("en")({}, f"{ENGLISH}\n```\n1\n```\n{FRENCH}\n```\n2\n```\n") < 0.6


def test_short_texts():
    reward = LanguageReward("en")
    assert reward({}, "Oui.") == 1.0
    assert reward.counts == {"too_short": 1}
    assert reward({}, "Oui 你好") == pytest.approx(3 / 5)
    assert reward({}, "你好") == 0.0
    assert reward({}, " \n") == 0.0
    assert reward({}, "42") == 1.0
    assert reward.counts == {"too_short": 2}
    assert LanguageReward("en", min_letters=10)({}, "Le chien paresseux") == 0.0


def test_the_language_of_the_prompt():
    reward = LanguageReward()
    assert reward.columns == ("prompt",)
    assert reward({"prompt": FRENCH}, FRENCH) == 1.0
    assert reward({"prompt": FRENCH}, ENGLISH) == 0.0
    chat = [{"role": "system", "content": ENGLISH}, {"role": "user", "content": FRENCH}]
    assert reward({"prompt": chat}, FRENCH) == 1.0
    assert reward({"prompt": f"```\n{ENGLISH}\n{ENGLISH}\n```\n{FRENCH}"}, FRENCH) == 1.0
    assert not reward.counts
    assert reward({"prompt": "1 + 1 = ?"}, FRENCH) is None
    assert reward.counts == {"unknown_prompt": 1}
    with pytest.raises(ValueError, match="no column 'prompt'; it has text"):
        reward({"text": "x"}, ENGLISH)


def test_candidates_narrow_the_choice():
    norwegian = "Jeg vet ikke hva jeg skal si, men det er bra."
    assert LanguageReward("en", candidates=["en", "de"])({}, ENGLISH) == 1.0
    assert LanguageReward("de", candidates=["en", "de"])({}, norwegian) == pytest.approx(
        1 - LanguageReward("en", candidates=["en", "de"])({}, norwegian)
    )
    assert LanguageReward("de")({}, norwegian) == LanguageReward("en")({}, norwegian) == 0.0


def test_the_prefill_has_a_language_kf50():
    assert LanguageReward("en")({}, Response("42", prefill=FRENCH)) == 0.0


def test_arguments_of_the_language_reward():
    assert LanguageReward("en").columns == ()
    with pytest.raises(ValueError, match=r"does not know the language 'english'; it knows .*en"):
        LanguageReward("english")
    with pytest.raises(ValueError, match="does not know the language 'xx'"):
        LanguageReward("en", candidates=["en", "xx"])
    for candidates in (["en"], ["en", "en"], ["de", "fr"]):
        with pytest.raises(ValueError, match="at least two languages, 'en' among them"):
            LanguageReward("en", candidates=candidates)
    with pytest.raises(ValueError, match="min_letters must be at least 1"):
        LanguageReward("en", min_letters=0)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(ImportError, match=r"pip install 'rlalign\[text\]'"):
        LanguageReward("en")


def test_hostile_text_is_read_in_linear_time():
    reward = LanguageReward("en")
    for piece in ("`", "```x\n", "$", "$a ", "\\[", "\\(", "<a", "http://", " . ", "\\[a", "\\a"):
        reward({}, piece * (60_000 // len(piece)))
