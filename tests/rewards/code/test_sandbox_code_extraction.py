import pytest

from rlalign.rewards import Response
from rlalign.rewards.code.answers import extract_code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\ntext\n```python\nb\n```\nmore", "b\n"),
        ("```python\na\n```\n```bash\npip install b\n```", "a\n"),
        ("```\na\n```\n\n```\nb\n```", "b\n"),
        ("```Python3\na\n```", "a\n"),
        ("```python title=x\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\n```\na\n```\n````", "```\na\n```\n"),
        ("  ```python\n  a\n    b\nc\n  ```", "a\n  b\nc\n"),
        ("1. Like so:\n\n    ```python\n    a\n    ```\n", "a\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ('```python\n"""\n    ```\n    a\n    ```\n"""\n```', '"""\n    ```\n    a\n    ```\n"""\n'),
        ('```python\n"""\n\t```\n"""\n```', '"""\n\t```\n"""\n'),
        ("```python\na\n`````", "a\n"),
        ("````python\na\n```\n````", "a\n```\n"),
        ("```a``` is no fence\n```python\nb\n```", "b\n"),
        ("\ufeffa = 1", "a = 1"),
        ("```python\na\n```\n```python\ncut of", "a\n"),
        ("```python\ncut of", None),
        ("    return 1\n", "    return 1\n"),
        ("def f(): pass", "def f(): pass"),
        ("", None),
        (" \n", None),
        ("```python\n\n```", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>\nb", "\nb"),
        ("<think>```python\na\n```", None),
        ("a</think>\n```python\nb\n```", "b\n"),
    ],
)
def test_the_code_of_a_response_kf73(response, code):
    assert extract_code(response) == code


def test_what_the_prompt_began_belongs_to_it():
    assert extract_code(Response("a = 1\n```", prefill="```python\n")) == "a = 1\n"
    assert extract_code(Response("never ends", prefill="<think>")) is None


@pytest.mark.parametrize(
    "text", ["```a\n" * 100_000, "`" * 100_000 + "\n" + "x\n" * 100_000, "```" + "a" * 300_000 + "`"]
)
def test_the_time_is_linear_in_the_text(text):
    """A search that is quadratic takes minutes here."""
    assert extract_code(text) in (None, text)
