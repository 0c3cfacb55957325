"""The notebooks run from top to bottom on a CPU, with smaller numbers in their first cell, and come without outputs."""

import io
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install --no-build-isolation -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install --no-build-isolation -e '.[test]'")
Image = pytest.importorskip("PIL.Image", reason="pip install --no-build-isolation -e '.[test]'")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))
import pictures  # noqa: E402

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
    drawn = Image.open(io.BytesIO(pictures.picture(notebook)))
    with Image.open(pictures.FOLDER / f"{path.stem}.png") as kept:
        assert all(abs(one / other - 1) < 0.1 for one, other in zip(drawn.size, kept.size, strict=True))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_picture_is_kept_and_shown(path):
    notebook, kept = nbformat.read(path, as_version=4), pictures.FOLDER / f"{path.stem}.png"
    assert kept.stat().st_size < 100_000
    with Image.open(kept) as image:
        assert image.info[pictures.DIGEST] == pictures.digest(notebook), "run python notebooks/pictures.py"
    assert f"](../docs/pictures/{kept.name})" in notebook.cells[0].source
    assert any(f"](pictures/{kept.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
