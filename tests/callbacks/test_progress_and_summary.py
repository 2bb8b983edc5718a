import io

from rich.console import Console

from rlalign.callbacks.progress import IterationProgress
from rlalign.callbacks.summary import estimate_memory, summarize
from runs import make_run


def shows(progress):
    return {"callbacks": [progress], "enable_progress_bar": True}


def test_a_line_an_iteration(tiny_model, prompts_file, capsys):
    progress = IterationProgress(bar=False)
    module, data, trainer = make_run(tiny_model, prompts_file, trainer=shows(progress) | {"max_epochs": 2})
    trainer.fit(module, data)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split("  ")[0] for line in lines] == ["iteration 1/2", "iteration 2/2"]
    assert "reward" in lines[0]
    assert "tokens/s" in lines[0]
    assert "ETA 0:00:" in lines[0]
    assert "ETA" not in lines[1]


def test_metrics_choose_what_is_shown(tiny_model, prompts_file, capsys):
    progress = IterationProgress(metrics={"long": "rollout/length_mean"}, bar=False)
    module, data, trainer = make_run(tiny_model, prompts_file, trainer=shows(progress))
    trainer.fit(module, data)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert line.startswith("iteration 1/1  long ")


def test_bar_on_a_terminal(tiny_model, prompts_file):
    progress = IterationProgress(bar=True)
    out = io.StringIO()
    progress.console = Console(file=out, force_terminal=True, width=100)
    module, data, trainer = make_run(tiny_model, prompts_file, trainer=shows(progress))
    trainer.fit(module, data)
    assert "━" in out.getvalue()
    assert progress.progress is None


def test_disabled_ranks_print_nothing(tiny_model, prompts_file, capsys):
    progress = IterationProgress(bar=False)
    progress.disable()
    progress.print("x")
    assert capsys.readouterr().out == ""
    progress.enable()
    progress.print("x")
    assert capsys.readouterr().out == "x\n"


def test_summary_tells_sizes_and_changes_nothing_kf91(tiny_model, prompts_file):
    module, data, trainer = make_run(
        tiny_model, prompts_file, trainer={"accumulate_grad_batches": 2}, step_size=8, num_passes=3, kl_coef=0.1
    )
    trainer.fit(module, data)
    lines = summarize(trainer, module)
    assert lines["prompts an iteration"] == "4"
    assert lines["completions an iteration"] == "16 (4 a prompt)"
    assert lines["response tokens an iteration"] == "at most 160"
    assert lines["optimizer steps an iteration"] == "6"  # 16 sequences, 8 a step, three times
    assert lines["minibatches an iteration"] == "12 a rank, on 1 rank(s)"
    assert "prompt <- prompt" in lines["prompts"]
    assert "top_k=0" in lines["sampling"]
    assert (data.step_size, data.num_passes, trainer.accumulate_grad_batches) == (8, 3, 2)


def test_memory_estimate_is_the_formula(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, kl_coef=0.1)
    trainer.fit(module, data)
    got = estimate_memory(module, data)
    weights = 4 * sum(p.numel() for p in module.policy.lm.parameters())
    assert got["weights"] == got["reference"] == got["gradients"] == weights
    assert got["optimizer"] == 2 * weights
    assert got["logits"] == 2 * 4 * 1024 * module.policy.model.config.vocab_size
    # Two layers, keys and values of two heads of eight numbers in float32, 16 rows of at most 5 + 10 tokens.
    longest = max(len(prompt.ids) for prompt in data.train_prompts)
    assert got["cache"] == 2 * 2 * 2 * 8 * 4 * 16 * (longest + 10)
