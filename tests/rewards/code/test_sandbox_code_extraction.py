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
        ("  ```python\n  a\n  ```", "  a\n"),
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
