"""The stages of a pipeline: what its file says, checked before the first of them starts."""

import contextlib
import difflib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from rlalign.assets import resolve
from rlalign.cli.errors import told
from rlalign.cli.trainer import TrainerCLI, reusable
from rlalign.models.policy import locate_model

REFERENCE = re.compile(r"\$\{\s*(stages?\b[^}]*)\}")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
NOT_OF_A_STAGE = ("run", "ckpt_path", "weights_only")
"""What the pipeline decides for its stages."""
SECTIONS = ("config", "seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", *NOT_OF_A_STAGE)
"""First parts of options of ``rlalign fit``: no name for a stage, whose options begin with its name."""
FILES = (".jsonl", ".json", ".csv", ".parquet", ".gz")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would take the last one, and a stage would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number] and key != "<<":
                raise ValueError(
                    f"'{key}' stands there twice, again in line {node.value[number][0].start_mark.line + 1}."
                )
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Stage:
    """One stage, all of its settings settled but for what earlier stages will make."""

    name: str
    settings: dict[str, Any]
    """As a configuration file has them, complete; ``${stages.NAME.model}`` is the model folder of an earlier stage."""

    @property
    def needs(self) -> list[str]:
        """Names of the stages whose models it takes."""
        found = [match.split(".")[1] for text in _strings(self.settings) for match in REFERENCE.findall(text)]
        return list(dict.fromkeys(found))

    def filled(self, models: dict[str, str]) -> dict[str, Any]:
        """The settings with every reference replaced.

        Args:
            models: Name of a stage -> its model folder.
        """
        filled: dict[str, Any] = _map_strings(
            self.settings, lambda text: REFERENCE.sub(lambda match: models[match[1].split(".")[1]], text)
        )
        return filled

    @property
    def starts_from(self) -> str | None:
        """The model that it trains, or the reference to it; ``None`` if its settings do not say."""
        arguments = self.settings["model"].get("init_args", {})
        found = (arguments.get("policy") or {}).get("model") or arguments.get("model")
        return found if isinstance(found, str) else None


class StageParser(TrainerCLI):
    """Parses the arguments of fit, and does nothing with them."""

    writes = False

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None:
        """Nothing: the folder is the pipeline's matter."""

    def instantiate_classes(self) -> None:
        """Nothing: see :meth:`build`."""

    def _run_subcommand(self, subcommand: str) -> None: ...

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        text = self._parser("fit").dump(reusable(self.options, Path()), skip_unset=False)
        settings: dict[str, Any] = yaml.safe_load(text)
        return {name: value for name, value in settings.items() if name not in NOT_OF_A_STAGE}

    def build(self, model: str | None) -> None:
        """Make the objects that can be made before earlier stages have run, so that bad arguments are told.

        Args:
            model: Takes the place of a reference in ``model.policy.model``.
        """
        config = self.options.clone()
        policy = config.model.get("init_args", {}).get("policy")
        if model is not None and policy is not None and REFERENCE.search(str(policy.get("model"))):
            policy.model = model
        for name in ("model", "data"):
            if name in config and REFERENCE.search(str(config[name])):
                config.pop(name)
        self._parser("fit").instantiate(config)


def read_stages(path: Path, overrides: dict[str | None, list[str]]) -> list[Stage]:
    """The stages of a pipeline file.

    Args:
        path: YAML with ``stages``: name -> ``config``, files relative to this one, and ``settings``, as in such a file.
        overrides: Name of a stage -> options of fit; those of ``None`` are for all stages.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If something is wrong with a stage; the message names it.
    """
    if not path.is_file():
        known = [str(p) for p in Path("configs/pipelines").glob("*.yaml")]
        near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.75)
        raise FileNotFoundError(f"there is no pipeline {path}{f'; did you mean {near[0]}?' if near else '.'}")
    try:
        content = yaml.load(path.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    given = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(given, dict) or not given or set(content) != {"stages"}:
        raise ValueError(f"{path}: expected 'stages', each with 'config' and 'settings', and nothing beside it.")
    unknown = [str(name) for name in overrides if name is not None and name not in given]
    if unknown:
        raise ValueError(f"there is no stage '{unknown[0]}' in {path}; there are {', '.join(map(str, given))}.")
    stages: list[Stage] = []
    for name, content in given.items():
        with _of_stage(name):
            options = overrides.get(None, []) + overrides.get(name, [])
            stages.append(_read_stage(path, name, content, options, stages))
    return stages


def _read_stage(path: Path, name: Any, content: Any, options: Sequence[str], before: list[Stage]) -> Stage:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in SECTIONS:
        raise ValueError(f"the name must be letters, digits, - and _, and none of {', '.join(SECTIONS)}.")
    if not isinstance(content, dict) or not content or not set(content) <= {"config", "settings"}:
        got = ", ".join(map(str, content)) if isinstance(content, dict) and content else repr(content)
        raise ValueError(f"expected 'config' (files) and 'settings', got {got}.")
    files = content.get("config", [])
    files = [os.path.normpath(path.parent / file) for file in ([files] if isinstance(files, str) else files)]
    arguments = [f"--config={file}" for file in files]
    with tempfile.TemporaryDirectory() as folder:
        if content.get("settings"):
            inline = Path(folder) / "settings.yaml"
            inline.write_text(yaml.safe_dump(content["settings"], sort_keys=False))
            arguments.append(f"--config={inline}")
        parser = _parse(["fit", *arguments, *options])
    decided = [each for each in ("run", "ckpt_path") if parser.options.get(each) is not None]
    if decided:
        raise ValueError(f"{decided[0]} is decided by the pipeline; leave it out.")
    stage = Stage(name, parser.settings)
    _check_references(stage, before)
    _check_files(stage)
    by_name = {each.name: each for each in before}
    origin = stage
    while origin.starts_from is not None and (match := REFERENCE.search(origin.starts_from)):
        origin = by_name[match[1].split(".")[1]]
    if origin.starts_from is not None:
        locate_model(origin.starts_from)
    parser.build(origin.starts_from)
    return stage


def _parse(arguments: list[str]) -> StageParser:
    """Parse the arguments of fit; what the parser says when it ends the program becomes an error.

    Raises:
        ValueError: If it says something.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return StageParser(arguments)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(said.getvalue().strip().removeprefix("rlalign: error: ")) from end
    finally:
        if sys.exc_info()[0] is None:
            sys.stderr.write(said.getvalue())


def _check_references(stage: Stage, before: list[Stage]) -> None:
    names = [each.name for each in before]
    for text in _strings(stage.settings):
        for match in REFERENCE.findall(text):
            parts = match.strip().split(".")
            if len(parts) != 3 or parts[0] != "stages" or parts[2] != "model" or match != match.strip():
                raise ValueError(f"'${{{match}}}' is no reference; write ${{stages.NAME.model}}.")
            if parts[1] not in names:
                there_are = f"before it there are {', '.join(names)}" if names else "it is the first"
                raise ValueError(f"'${{{match}}}' names no earlier stage; {there_are}.")


def _check_files(stage: Stage) -> None:
    data = (stage.settings.get("data") or {}).get("init_args", {})
    for name in ("train", "val"):
        source = data.get(name)
        if not isinstance(source, str):
            continue
        file = Path(resolve(source.partition("?")[0]))
        if file.suffix in FILES and not file.is_file():
            raise FileNotFoundError(f"data.{name}: there is no file {file}.")


@contextlib.contextmanager
def _of_stage(name: Any) -> Iterator[None]:
    """Put the stage's name before what is wrong with it."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MisconfigurationException) as error:
        text = told(error)
        if text is None:
            raise
        raise ValueError(f"stage {name}: {text}") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _map_strings(value: Any, fn: Any) -> Any:
    if isinstance(value, dict):
        return {name: _map_strings(each, fn) for name, each in value.items()}
    if isinstance(value, list):
        return [_map_strings(each, fn) for each in value]
    return fn(value) if isinstance(value, str) else value
