"""Every notebook runs from top to bottom, and what it claims comes true."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path, report: str) -> tuple[Any, Any]:
    """The executed notebook, and the value of an expression at its end."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({report}))"))
    NotebookClient(notebook, timeout=540, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, json.loads(notebook.cells.pop().outputs[0].text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_every_notebook_is_executed_by_a_test_of_its_own():
    assert [path.stem for path in NOTEBOOKS] == ["quickstart"]


def test_quickstart_learns_and_shows_it(tmp_path):
    report = "[before['val/pass@1'], after['val/pass@1'], len(data.last_rollouts), module.kl_coef]"
    notebook, (before, after, num_rollouts, kl_coef) = execute(NOTEBOOKS[0], tmp_path, report)
    assert before <= 0.5
    assert after >= before + 0.2
    assert num_rollouts == 64 * 8
    assert kl_coef != 0.01, "AdaptiveKL did not act"
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert f"{before:.3f} -> {after:.3f}" in "".join(output.get("text", "") for output in outputs)
    folder = tmp_path / "runs" / "notebook"
    iterations = [json.loads(line)["iteration"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(set(iterations)) == [0, 5, 10, 15]
    assert (folder / "curves.png").stat().st_size > 10_000
