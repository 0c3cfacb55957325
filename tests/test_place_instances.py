"""Public problems, where a folder `shared/data/dsa` lies beside the repository. Left out elsewhere."""

from pathlib import Path

import pytest

from memo_hf.planner.placement import place
from memo_hf.planner.problem import read_problem

FOLDERS = [parent / "shared" / "data" / "dsa" for parent in Path(__file__).resolve().parents]
FOLDER = next((folder for folder in FOLDERS if folder.is_dir()), None)
pytestmark = pytest.mark.skipif(FOLDER is None, reason="no shared/data/dsa beside the repository")


@pytest.mark.parametrize(
    "name", ["input.12", "layer_rec_tp8", "layer_save_tp8", "flat_step_tp8", "torch_medium_128", "somas_resnet50"]
)
def test_training_steps_are_planned_without_a_gap(name):
    placement = place(read_problem(FOLDER / f"{name}.csv"), time_limit=10)
    assert placement.proved
    assert placement.gap == 0


@pytest.mark.parametrize("name", ["A", "C", "G", "I", "K"])
def test_hard_problems_fit(name):
    placement = place(read_problem(FOLDER / f"{name}.1048576.csv"), capacity=1_048_576, time_limit=30)
    assert placement.peak <= 1_048_576
