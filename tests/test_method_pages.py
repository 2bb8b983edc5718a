"""docs/methods/ has a page for every method, and says of options, metrics and files only what there is."""

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from lightning import LightningModule, Trainer

import rlalign.cli.classes  # noqa: F401  (imports everything that a configuration may name)
from rlalign.algorithms.module import TrainedModule
from rlalign.data.offline import OfflineDataModule
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "methods"
INDEX = FOLDER / "README.md"
NAMES = ROOT / "docs" / "names.md"
PAGES = sorted(set(FOLDER.glob("*.md")) - {INDEX})
SECTIONS = ["Formula", "When to use it", "What to watch", "Details that matter", "Run it", "Sources"]
MINE = "mine.yaml"


def subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


METHODS = {
    cls.__name__: cls
    for cls in subclasses(TrainedModule)
    if cls.__module__.startswith("rlalign.")
    and not inspect.isabstract(cls)
    and cls.training_step is not LightningModule.training_step
}
CLASSES = {
    name: cls
    for module in list(sys.modules.values())
    if module and module.__name__.startswith("rlalign.")
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__.startswith("rlalign.")
}
OWNERS = {
    "data": [RolloutDataModule, *subclasses(OfflineDataModule)],
    "policy": [PolicyConfig],
    "sampling": [SamplingParams],
    "trainer": [Trainer],
} | {name: [cls] for name, cls in CLASSES.items()}
"""What an option that is written with a dot belongs to."""


def defaults(cls: type) -> dict[str, object]:
    """Names of all arguments of a class and of what it is made of, with their defaults."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            found |= {p.name: p.default for p in inspect.signature(base.__init__).parameters.values()}
    return found


def text_of(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", text_of(page))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def title(page: Path) -> str:
    return page.read_text().splitlines()[0].removeprefix("# ")


def each_page(*more: Path):
    return pytest.mark.parametrize("page", [*PAGES, *more], ids=lambda page: page.stem)


def test_every_method_has_a_page_and_every_page_a_method():
    assert len(METHODS) >= 20
    assert sorted(title(page) for page in PAGES) == sorted(METHODS)
    assert {page.stem.replace("_", "") for page in PAGES} == {name.lower() for name in METHODS}


def test_the_tables_have_all_methods():
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \|.*\| `configs/(\w+)\.yaml` \|", INDEX.read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(METHODS)
    rows += re.findall(r"^\| \[`(\w+)`\]\(methods/(\w+)\.md\) \|.*/(\w+)\.py` \|$", NAMES.read_text(), re.MULTILINE)
    assert len(rows) == 2 * len(METHODS)
    assert [(name, title(FOLDER / f"{page}.md"), page) for name, page, _ in rows] == [
        (name, name, file) for name, _, file in rows
    ]


@each_page()
def test_a_page_is_short_and_in_order(page):
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert len(text.splitlines()) <= 60
    details = text.split("## Details that matter")[1].split("## ")[0]
    assert 5 <= len(re.findall(r"^- ", details, re.MULTILINE)) <= 9


@each_page(NAMES)
def test_formulas_have_no_escape_that_github_takes_away(page):
    text = text_of(page)
    assert text.count("$$") % 2 == 0
    formulas = re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL)
    assert formulas or page == NAMES
    inline = re.findall(r"\$([^$\n]+)\$", re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL))
    for formula in [*formulas, *inline]:
        assert re.findall(r"\\[^A-Za-z]|[<>]", formula) == [], formula
        assert formula.count("{") == formula.count("}"), formula


@each_page()
def test_it_is_run_by_its_configs(page):
    lines = [shlex.split(line) for block in blocks(page, "bash") for line in block.splitlines()]
    configs = [[path for flag, path in pairwise(words) if flag == "--config"] for words in lines]
    tiny, real = f"configs/tiny/{page.stem}.yaml", f"configs/{page.stem}.yaml"
    assert configs[:2] == [["configs/base.yaml", tiny], ["configs/base.yaml", real, MINE]]
    for path in (tiny, real):
        assert yaml.safe_load((ROOT / path).read_text())["model"]["class_path"] == title(page), path
    options = [
        word.split("=")[0].removeprefix("--model.init_args.") for words in lines for word in words if "=" in word
    ]
    assert set(options) <= set(defaults(METHODS[title(page)]))


@each_page(INDEX, NAMES)
def test_what_it_points_to_exists(page):
    quoted = [c for c in code_of(page) if re.match(r"(rlalign|configs|docs|tests|scripts)/", c) and "NAME" not in c]
    missing = [path for path in quoted if not (ROOT / path).exists()]
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text_of(page)):
        target = page.parent / path
        if not target.exists():
            missing.append(path)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert missing == []
    known = set(re.findall(r"\d{4}\.\d{5}", "".join(path.read_text() for path in (ROOT / "rlalign").rglob("*.py"))))
    cited = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", page.read_text())
    assert set(cited) - known <= {"2411.15124"}, "a paper that no docstring cites"


@each_page(INDEX)
def test_metrics_are_those_that_are_documented(page):
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    patterns = [re.sub(r"[A-Z]+", r"[^/]+", row) for row in rows]  # NAME, K and the like stand for anything
    named = {code for code in code_of(page) if re.fullmatch(r"(train|val|rollout|perf)/[\w@/]+", code)}
    assert named or page == INDEX
    assert {name for name in named if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


@each_page(NAMES)
def test_classes_exist(page):
    assert {c for c in code_of(page) if re.fullmatch(r"[A-Z]\w*[a-z]\w*", c)} - set(CLASSES) == set()


@each_page()
def test_options_are_taken_by_the_class(page):
    cls, checked = METHODS[title(page)], 0
    for code in code_of(page):
        owner, name, has_value, value = re.fullmatch(r"(?:(\w+)\.)?(\w*)(=?)(.*)", code).groups()
        if called := re.fullmatch(r"(\w+)\((\w+=.*)\)", code):
            assert set(re.findall(r"(\w+)=", called[2])) <= set(defaults(CLASSES[called[1]])), code
        elif owner in OWNERS:
            assert any(name in defaults(each) for each in OWNERS[owner]), code
        elif has_value:
            known = defaults(cls)
            assert name in known, code
            cls(**{name: yaml.safe_load(value) if value else known[name]})  # what a subclass has fixed is refused
            checked += 1
    assert checked or cls.__name__ == "SFT"


def test_the_files_of_ones_own_name_options_that_there_are():
    methods = {name for cls in METHODS.values() for name in defaults(cls)}
    data = {name for cls in OWNERS["data"] for name in defaults(cls)}
    found = [yaml.safe_load(block) for block in blocks(INDEX, "yaml")]
    assert len(found) == 2
    for config in found:
        assert set(config) == {"model", "data"}
        assert set(config["model"]["init_args"]) <= methods
        assert set(config["data"]["init_args"]) <= data
        assert set(config["model"]["init_args"]["policy"]) <= set(defaults(PolicyConfig))
        assert {each["class_path"] for each in config["data"]["init_args"].get("rewards", {}).values()} <= set(CLASSES)
