import builtins
import gc

import matplotlib
import matplotlib.pyplot
import pytest
import torch
from lightning import Callback
from matplotlib.image import imread

from rlalign.callbacks import (
    AdaptiveKL,
    CurvePlot,
    EntropySchedule,
    GradNormBand,
    KLBand,
    RewardMonitor,
    SampleTable,
)
from rlalign.callbacks.plots import draw_curves
from short_runs import Feed, checkpoint, run


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "20+1=", "answer": "21"}\n')
    return str(path)


def test_a_picture_at_the_end(tiny_model, prompts_file, held_out, tmp_path):
    backend = matplotlib.get_backend()
    plot = CurvePlot()
    trainer, _, _, _ = run(tiny_model, prompts_file, tmp_path, [plot], 3, data={"val": held_out})
    image = imread(tmp_path / "curves.png")
    assert min(image.shape[:2]) > 300
    assert image.std() > 0.01, "something is drawn"
    assert [i for i, _ in plot.history["rollout/reward"]] == [0, 1, 2]
    assert plot.history["val/pass@1"][-1][1] == float(trainer.callback_metrics["val/pass@1"])
    assert not list(tmp_path.glob(".*"))
    assert matplotlib.get_backend() == backend
    assert matplotlib.pyplot.get_fignums() == []


def test_validation_is_drawn_where_it_was_made(tiny_model, prompts_file, held_out, tmp_path):
    plot = CurvePlot()
    settings = {"check_val_every_n_epoch": 2}
    run(tiny_model, prompts_file, tmp_path, [plot], 4, data={"val": held_out}, trainer=settings)
    assert [i for i, _ in plot.history["val/pass@1"]] == [1, 3]


def test_every_and_file(tiny_model, prompts_file, tmp_path):
    class Seen(Callback):
        def __init__(self):
            self.drawn = []

        def on_train_epoch_start(self, trainer, pl_module):
            path = tmp_path / "mine.png"
            self.drawn.append(path.exists())
            path.unlink(missing_ok=True)

    seen = Seen()
    run(tiny_model, prompts_file, tmp_path, [CurvePlot(every=2, file="mine.png"), seen], 5)
    assert seen.drawn == [False, False, True, False, True]
    assert (tmp_path / "mine.png").exists()


def test_the_whole_run_is_drawn_after_a_resume(tiny_model, prompts_file, tmp_path):
    panels = {"fed": {"fed/value": "value"}}
    feed = Feed("fed/value", [1.0, 2.0, 3.0])
    run(tiny_model, prompts_file, tmp_path, [feed, CurvePlot(panels=panels)], 2)
    plot = CurvePlot(panels=panels)
    run(tiny_model, prompts_file, tmp_path, [feed, plot], 3, resume=checkpoint(tmp_path, 2))
    assert plot.history == {"fed/value": [[0, 1.0], [1, 2.0], [2, 3.0]]}


def test_panels_without_values_are_left_out():
    figure = draw_curves({"train/kl_ref": [[0, 0.1], [1, 0.2]], "val/pass@1": [[1, 0.5]]}, title="a run")
    assert [axes.get_title() for axes in figure.axes] == ["pass@1", "KL (nats a token)"]
    lines = {line.get_label(): line.get_xydata().tolist() for axes in figure.axes for line in axes.lines}
    assert lines == {"to the reference": [[0, 0.1], [1, 0.2]], "held out": [[1, 0.5]]}
    assert figure.get_suptitle() == "a run"


def test_a_notebook_is_kept_up_to_date(tiny_model, prompts_file, tmp_path, monkeypatch):
    import IPython.display

    shown = []

    class Handle:
        def update(self, image):
            shown.append(("update", image.data[:4]))

    def display(image, display_id):
        shown.append(("display", image.data[:4]))
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    run(tiny_model, prompts_file, tmp_path / "a", [CurvePlot(every=1, live=True)], 2)
    assert shown == [("display", b"\x89PNG"), ("update", b"\x89PNG"), ("update", b"\x89PNG")]
    shown.clear()
    run(tiny_model, prompts_file, tmp_path / "b", [CurvePlot(every=1)], 2)
    assert shown == []


def test_live_without_ipython(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("IPython"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="live=True needs IPython"):
        CurvePlot(live=True).setup(None, None, "fit")


def test_a_resume_at_the_very_end_kf95(tiny_model, prompts_file, tmp_path):
    first, again = CurvePlot(), CurvePlot()
    run(tiny_model, prompts_file, tmp_path, [first], 2)
    run(tiny_model, prompts_file, tmp_path, [again], 2, resume=checkpoint(tmp_path, 2))
    assert again.history == first.history


@pytest.mark.parametrize("options", [{"every": 0}, {"file": "curves.svg"}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="CurvePlot: "):
        CurvePlot(**options)


def test_no_callback_keeps_tensors_kf90(tiny_model, prompts_file, tmp_path):
    class Count(Callback):
        def __init__(self):
            self.counts = []

        def on_train_epoch_start(self, trainer, pl_module):
            gc.collect()
            self.counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))

    count = Count()
    callbacks = [
        AdaptiveKL(),
        EntropySchedule(),
        KLBand(action_high="end_iteration"),
        GradNormBand(),
        RewardMonitor(),
        SampleTable(),
        CurvePlot(every=5),
        count,
    ]
    run(tiny_model, prompts_file, tmp_path, callbacks, 22)
    assert max(count.counts[2:]) == count.counts[2]
