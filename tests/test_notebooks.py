"""The notebooks run from top to bottom on a CPU, with smaller numbers in their first cell, and come without outputs."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install 'memo-hf[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install 'memo-hf[test]'")

ROOT = Path(__file__).parents[1]
# Of the first cell; the rest runs as it stands.
SMALLER = {
    "1_four_times_the_context": {"tokens": "256", "num_layers": "3", "checkpoint": "'no/checkpoint'"},
    "2_how_much_context_fits": {"model": "'smollm2-135m'"},
    "3_inside_a_step": {"tokens": "2048", "num_layers": "4", "hidden": "64"},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_all_are_run():
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALLER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, "clear all outputs before committing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # of other people's code, in a process of its own
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for name, value in SMALLER[path.stem].items():
        parameters.source, found = re.subn(
            rf"^{name} = .*$", f"{name} = {value}", parameters.source, flags=re.MULTILINE
        )
        assert found == 1, name
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", ()) for output in outputs), "no picture"
