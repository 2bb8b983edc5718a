"""Stages, each from what the one before has made; cut off anywhere, a pipeline ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from rlalign.cli import main, stage_process
from rlalign.cli.pipeline import split_overrides
from rlalign.cli.stages import read_stages

ROOT = Path(__file__).resolve().parents[2]
PIPELINES = sorted((ROOT / "configs" / "pipelines").glob("*.yaml"))

KILLING = """
import os, signal
from lightning import Callback

class KillAt(Callback):
    '''Kills a process in the middle of an iteration, the second of the stage that KILL_IN names.'''

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def on_train_batch_end(self, trainer, *args, **kwargs) -> None:
        whom = {"parent": os.getppid, "self": os.getpid}
        stage, _, target = os.environ.get("KILL_IN", "").partition(":")
        if stage == self.stage and trainer.current_epoch == 1:
            os.kill(whom[target](), signal.SIGKILL)
            signal.pause()
"""


def in_this_process(arguments) -> int:
    """A stage without a process of its own: imports are paid for here."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # restored afterwards, whatever a command sets
    monkeypatch.delenv("RLALIGN_RUN")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process, for stages in one of their own
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def in_process(monkeypatch):
    """Stages run here, where imports are paid for; what they were told."""
    told: list[list[str]] = []

    def run(arguments):
        told.append(list(arguments))
        return in_this_process(arguments)

    monkeypatch.setattr(stage_process, "run", run)
    return told


def write_pipeline(folder: Path, tiny_model: str) -> Path:
    """SFT, then DAPO, three iterations each, of a tiny model."""
    (folder / "killing.py").write_text(KILLING)
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": f"{i + i % 3}"} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}

    def trainer(name):
        kill_at = {"class_path": "killing.KillAt", "init_args": {"stage": name}}
        return {
            "max_epochs": 3,
            "accelerator": "cpu",
            "callbacks": [kill_at, {"class_path": "IterationCheckpoint"}],
        }

    base = {"seed_everything": 4, "trainer": {"check_val_every_n_epoch": 1, "enable_progress_bar": False}}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    sft = {
        "trainer": trainer("sft"),
        "model": {"class_path": "SFT", "init_args": {"policy": {"model": tiny_model}, "optimizer": optimizer}},
        "data": {
            "class_path": "DemonstrationDataModule",
            "init_args": {
                "train": "rows.jsonl",
                "num_held_out": 4,
                "columns": {"prompt": "prompt", "response": "answer"},
                "step_size": 4,
            },
        },
    }
    dapo = {
        "trainer": trainer("dapo"),
        "model": {
            "class_path": "DAPO",
            "init_args": {
                "policy": {"model": "${stages.sft.model}"},
                "optimizer": optimizer,
                "filter_by": "reward",
                "max_rounds": 2,
            },
        },
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "train": "rows.jsonl",
                "num_held_out": 4,
                "rewards": {"near": "runs.length_reward"},
                "sampling": {"max_new_tokens": 5},
                "prompts_per_iteration": 2,
                "group_size": 4,
                "step_size": 4,
                "val_limit": 2,
            },
        },
    }
    path = folder / "cold.yaml"
    stages = {name: {"config": "base.yaml", "settings": s} for name, s in (("sft", sft), ("dapo", dapo))}
    path.write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    return path
    return path


@pytest.fixture
def pipeline(tmp_path, tiny_model) -> Path:
    """The file of a pipeline."""
    return write_pipeline(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model) -> Path:
    """The folder of that pipeline, run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_pipeline(folder, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("RLALIGN_RUN", "")
        patch.setattr(stage_process, "run", in_this_process)
        assert main(["pipeline", str(path)]) == 0
    return folder / "runs" / "cold"


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["pipeline", *map(str, arguments)])
    assert end.value.code
    return capsys.readouterr().err


def change(path: Path, stage: str, **settings) -> None:
    content = yaml.safe_load(path.read_text())
    content["stages"][stage]["settings"] |= settings
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def assert_same_end(one: Path, two: Path) -> None:
    for stage in ("sft", "dapo"):
        files = [run / stage / "model" / "model.safetensors" for run in (one, two)]
        assert files[0].read_bytes() == files[1].read_bytes(), stage
        ends = [torch.load(run / stage / "checkpoints/last.ckpt", weights_only=True) for run in (one, two)]
        for part in ("epoch", "global_step", "lr_schedulers"):
            assert ends[0][part] == ends[1][part], (stage, part)
        state = [end["optimizer_states"][0]["state"] for end in ends]
        assert all(torch.equal(v, state[1][k][n]) for k, of in state[0].items() for n, v in of.items()), stage


# ---- what a pipeline does --------------------------------------------------------------------------------------------


def test_each_stage_starts_from_the_model_of_the_one_before(pipeline, whole, in_process, tmp_path, capsys, tiny_model):
    assert main(["pipeline", str(pipeline)]) == 0
    folder = tmp_path / "runs" / "cold"
    assert json.loads((folder / "state.json").read_text()) == {"done": ["sft", "dapo"]}
    model = yaml.safe_load((folder / "dapo" / "config.yaml").read_text())["model"]["init_args"]["policy"]["model"]
    assert model == "runs/cold/sft/model"
    sft = torch.load(folder / "sft/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    exported = AutoModelForCausalLM.from_pretrained(folder / "sft" / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(sft[f"policy.lm.{name}"], value) for name, value in exported.items())
    assert any(not torch.equal(start[name], value) for name, value in exported.items())
    shown = capsys.readouterr().out
    assert "stage 1 of 2: sft" in shown
    assert "stage 2 of 2: dapo (sft done, dapo now)" in shown
    table = shown[shown.index("at the end of each stage") :]
    assert "val/loss" in table
    assert "val/pass@1" in table
    # The copy is a pipeline, too, and complete: it runs without the files it was made of.
    for name in ("cold.yaml", "base.yaml"):
        (tmp_path / name).unlink()
    assert main(["pipeline", str(folder / "pipeline.yaml"), "--run=again"]) == 0
    assert_same_end(whole, tmp_path / "runs" / "again")


def test_a_finished_pipeline_is_left_alone(pipeline, in_process, capsys):
    main(["pipeline", str(pipeline), "--run=a"])
    assert len(in_process) == 2
    capsys.readouterr()
    assert main(["pipeline", str(pipeline), "--run=a"]) == 0
    assert len(in_process) == 2
    assert "stage 2 of 2: dapo is done" in capsys.readouterr().out


def test_options_for_one_stage_and_for_all(pipeline, in_process, tmp_path):
    options = ["--sft.trainer.max_epochs=1", "--trainer.max_epochs", "2", "--seed_everything=5"]
    assert main(["pipeline", str(pipeline), "--run=x/y", *options]) == 0
    configs = [yaml.safe_load((tmp_path / "x/y" / s / "config.yaml").read_text()) for s in ("sft", "dapo")]
    assert [c["trainer"]["max_epochs"] for c in configs] == [1, 2]
    assert [c["seed_everything"] for c in configs] == [5, 5]


def test_options_are_split_by_stage():
    assert split_overrides(["--a.trainer.x=1.5", "--seed_everything", "3", "--b.data.y", "4", "--trainer.z=1"]) == {
        "a": ["--trainer.x=1.5"],
        None: ["--seed_everything", "3", "--trainer.z=1"],
        "b": ["--data.y", "4"],
    }


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.stem)
def test_shipped_pipelines_are_in_order(path):
    stages = read_stages(path, {})
    assert len(stages) > 1
    assert {name for stage in stages[1:] for name in stage.needs}, "a later stage starts from an earlier one"


# ---- cut off ---------------------------------------------------------------------------------------------------------


def test_killed_in_every_stage_it_ends_the_same(pipeline, whole, tmp_path, monkeypatch, capfd):
    command = [sys.executable, "-m", "rlalign.cli", "pipeline", str(pipeline), "--run", "killed"]
    env = os.environ | {"KILL_IN": "sft:parent", "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT / 'tests'}"}
    # The pipeline is killed, and its stage notices: the pipe is at its end when no process is left to write to it.
    killed = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    run = tmp_path / "runs" / "killed"
    saved = {path.name for path in (run / "sft" / "checkpoints").iterdir()}
    assert saved == {"iteration=00001.ckpt", "last.ckpt"}
    assert not (run / "sft" / "model").exists()
    # The next stage is killed, and the pipeline says so.
    monkeypatch.setenv("KILL_IN", "dapo:self")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    said = refused(capfd, pipeline, "--run=killed")
    assert "stage dapo ended with status -9" in said
    assert (run / "sft" / "model").exists()
    monkeypatch.delenv("KILL_IN")
    monkeypatch.setattr(stage_process, "run", in_this_process)
    assert main(["pipeline", str(pipeline), "--run", "killed"]) == 0
    assert_same_end(run, whole)


def test_cut_off_between_stages_it_ends_the_same(pipeline, whole, in_process, tmp_path, monkeypatch):
    import rlalign.cli.pipeline as module

    class Cut(BaseException):
        """Stands for a kill."""

    def cut_at(moment, call):
        original, calls = getattr(module, moment), 0

        def cut(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                raise Cut
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, moment, cut)
            with pytest.raises(Cut):
                main(["pipeline", str(pipeline), "--run=cut"])

    cut_at("export", 1)
    cut_at("publish", 1)
    cut_at("write_atomically", 3)  # after those of the pipeline and of the stage's settings, that of the state
    assert not (tmp_path / "runs" / "cut" / "state.json").exists()
    cut_at("publish", 2)
    assert main(["pipeline", str(pipeline), "--run=cut"]) == 0
    assert_same_end(tmp_path / "runs" / "cut", whole)
    assert not list((tmp_path / "runs" / "cut").rglob(".model.tmp"))


def test_a_stage_that_a_callback_ended_is_not_trained_any_further(pipeline, in_process, tmp_path, monkeypatch):
    import rlalign.cli.pipeline as module

    def interrupted(*args):
        raise KeyboardInterrupt

    budget = {"class_path": "TokenBudget", "init_args": {"max_tokens": 1}}
    content = yaml.safe_load(pipeline.read_text())
    content["stages"]["sft"]["settings"]["trainer"]["callbacks"].append(budget)
    pipeline.write_text(yaml.safe_dump(content, sort_keys=False))
    with monkeypatch.context() as patch:
        patch.setattr(module, "export", interrupted)
        assert main(["pipeline", str(pipeline), "--run=a"]) == 130
    assert len(in_process) == 1
    assert main(["pipeline", str(pipeline), "--run=a"]) == 0
    assert [arguments[2].rpartition("/")[2] for arguments in in_process] == ["sft", "dapo"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_stage_that_fails_says_how_to_go_on(pipeline, in_process, tmp_path, capsys):
    options = ["--run=a", "--dapo.data.prompts_per_iteration=9"]
    said = refused(capsys, pipeline, *options)
    assert "data.prompts_per_iteration=9 is more than the 8 prompts" in said
    assert "stage dapo ended with status 1; what it said is above" in said
    # What had not begun may be mended.
    assert main(["pipeline", str(pipeline), "--run=a", "--dapo.data.prompts_per_iteration=4"]) == 0
    assert "changed before stage dapo began: data.init_args.prompts_per_iteration: 9 -> 4" in capsys.readouterr().out


def test_another_pipeline_than_before_is_refused(pipeline, in_process, tmp_path, capsys):
    main(["pipeline", str(pipeline), "--run=a"])
    capsys.readouterr()
    said = refused(capsys, pipeline, "--run=a", "--dapo.trainer.max_epochs=4")
    assert "stage dapo has begun, and differs in trainer.max_epochs: 3 -> 4. Choose another --run NAME" in said
    content = yaml.safe_load(pipeline.read_text())
    content["stages"] = {"warm": content["stages"]["sft"]} | content["stages"]
    pipeline.write_text(yaml.safe_dump(content, sort_keys=False))
    assert "stages sft, dapo have begun; this one has warm, sft, dapo" in refused(capsys, pipeline, "--run=a")
    assert len(in_process) == 2


def test_a_folder_of_something_else_is_refused(pipeline, in_process, tmp_path, capsys):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.csv").touch()
    assert "runs/a holds something else than a pipeline" in refused(capsys, pipeline, "--run=a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--dapo.model.clip_hihg=0.3"], "stage dapo: model: DAPO has no option 'clip_hihg'; did you mean clip_high?"),
        (["--dapo.data.group_size=0"], "stage dapo: data.group_size must be at least 1, got 0"),
        (["--dapo.model.clip_low=-1"], "stage dapo: "),
        (["--dappo.data.group_size=2"], "there is no stage 'dappo'"),
        (["--dapo.data.train=rowz.jsonl"], "stage dapo: data.train: there is no file rowz.jsonl"),
        (["--sft.model.policy.model=./nowhere"], "stage sft: policy.model=./nowhere: no config.json"),
        (["--dapo.model.policy.model=${stages.ppo.model}"], "names no earlier stage; before it there are sft"),
        (["--dapo.model.policy.model=${stages.dapo.model}"], "names no earlier stage; before it there are sft"),
        (["--sft.model.policy.model=${stages.dapo.model}"], "names no earlier stage; it is the first"),
        (["--dapo.model.policy.model=${stage.sft.model}"], "is no reference; write ${stages.NAME.model}"),
        (["--dapo.model.policy.model=${stages.sft.policy}"], "is no reference; write ${stages.NAME.model}"),
        (["--dapo.ckpt_path=last"], "stage dapo: ckpt_path is decided by the pipeline"),
    ],
)
def test_everything_is_checked_before_the_first_stage(pipeline, in_process, tmp_path, capsys, options, told):
    said = refused(capsys, pipeline, *options)
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    assert not in_process


def test_bad_files_are_refused(pipeline, tmp_path, capsys):
    assert f"there is no pipeline {tmp_path}/nothing.yaml" in refused(capsys, tmp_path / "nothing.yaml")
    for text, told in (
        ("stages: [", "is no YAML"),
        ("steps: {}", "expected 'stages'"),
        ("stages:\n  a: {config: base.yaml}\n  a: {config: base.yaml}", "'a' stands there twice, again in line 3"),
        ("stages: {trainer: {config: base.yaml}}", "stage trainer: the name must be"),
        ("stages: {a b: {config: base.yaml}}", "stage a b: the name must be"),
        ("stages: {sft: {confg: base.yaml}}", "stage sft: expected 'config' (files) and 'settings'"),
        ("stages: {sft: {config: bas.yaml}}", "stage sft: --config: there is no file"),
    ):
        pipeline.write_text(text)
        assert told in refused(capsys, pipeline), text


# ---- a stage's process -----------------------------------------------------------------------------------------------

WAITING = """
import os, signal, subprocess, sys
def main(argv):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(os.getpid(), flush=True)
    signal.pause()
"""
CUSTOM = "import rlalign.cli; rlalign.cli.COMMANDS['wait'] = ('waiting:main', '')"


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGINT, 1)])
def test_no_process_outlives_the_pipeline(tmp_path, sent, status):
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    # Who runs the tests may ignore SIGINT, as a shell does for what it runs in the background.
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += "from rlalign.cli import stage_process; sys.exit(stage_process.run(['wait']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        stage = int(process.stdout.readline())
        assert stage != process.pid
        os.kill(process.pid, sent)
        assert process.stdout.read() == b""  # at its end: all that had it are gone
    assert process.returncode in (status, -sent)


def test_a_stage_tells_its_status(capfd):
    assert stage_process.run(["--version"]) == 0
    assert stage_process.run(["no-such-command"]) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
