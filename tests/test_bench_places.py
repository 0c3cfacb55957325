"""The benchmark of address plans writes its rows, and says with its exit code where a bar is missed."""

import csv
import sys
from functools import partial
from pathlib import Path

import pytest

from memo_hf.planner.trace import write_trace

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import bench_places  # noqa: E402
from synthetic_step import llama_step  # noqa: E402

sys.path.remove(str(BENCHMARKS))

EASY = "id,lower,upper,size\na,0,4,4\nb,2,6,2\nc,4,8,4\n"
# No plan reaches the lower bound of 8, so the bar of 1.001 is out of reach.
OUT_OF_REACH = "id,lower,upper,size\n" + "".join(
    f"{i},%d,%d,%d\n" % life
    for i, life in enumerate(
        [(0, 3, 3), (0, 4, 5), (3, 5, 1), (4, 5, 3), (3, 6, 2), (4, 6, 2), (5, 7, 4), (6, 8, 4), (7, 8, 4)]
    )
)


@pytest.mark.parametrize(
    "problem, missed", [(EASY, "none"), (OUT_OF_REACH, "layer_rec_tp8")], ids=["all met", "one missed"]
)
def test_rows_and_exit_code(tmp_path, monkeypatch, capsys, problem, missed):
    monkeypatch.setattr(bench_places, "llama_step", partial(llama_step, num_layers=1))
    (tmp_path / "layer_rec_tp8.csv").write_text(problem)
    (tmp_path / "A.1048576.csv").write_text(EASY)
    write_trace(llama_step(num_layers=2, tokens=64), tmp_path / "step.csv")
    output = tmp_path / "places.csv"
    command = ["--data", str(tmp_path), "--trace", str(tmp_path / "step.csv"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench_places.py", *command])
    assert bench_places.main() == (missed != "none")
    printed = capsys.readouterr().out
    assert "hard problems within 1,048,576: 1 of 1" in printed
    assert printed.splitlines()[-1] == f"missed: {missed}"
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["what"] for row in rows[:2]] == ["layer_rec_tp8", "A.1048576"]
    assert [row["what"] for row in rows[-2:]] == ["step, flat", "step, two levels"]
    assert float(rows[0]["ratio"]) == (1.0 if missed == "none" else 1.125)
    assert {row["met"] for row in rows[1:]} == {"True"}
