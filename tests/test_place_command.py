"""`memo-hf place`: what it prints and writes, its exit codes, and that it starts without torch."""

import pickle
import subprocess
import sys

import pytest

from memo_hf.cli import build_parser, main
from memo_hf.planner.placement import METHODS
from memo_hf.planner.problem import Placement, Problem, read_placement
from memo_hf.planner.verify import verify

BUFFERS = "id,lower,upper,size\na,0,4,4\nb,2,6,2\nc,4,8,4\n"
TRACE = "op,id,size,phase,stream,thread\nmalloc,0,600,forward 0,0,0\nfree,0,0,forward 0,0,0\n"


@pytest.fixture
def instance(tmp_path):
    path = tmp_path / "step.csv"
    path.write_text(BUFFERS)
    return path


def test_writes_a_plan(instance, tmp_path, capsys):
    output = tmp_path / "plan.csv"
    assert main(["place", str(instance), "--output", str(output)]) == 0
    assert verify(read_placement(output), capacity=6).peak == 6
    printed = capsys.readouterr().out
    assert "peak         6 bytes" in printed
    assert "proved optimal" in printed


def test_capacity_decides_the_exit_code(instance, tmp_path, capsys):
    assert main(["place", str(instance), "--capacity", "6"]) == 0
    output = tmp_path / "plan.csv"
    assert main(["place", str(instance), "--capacity", "5B", "--output", str(output)]) == 1
    assert "NOT within the capacity of 5 bytes: the best peak found is 6" in capsys.readouterr().out
    assert verify(read_placement(output)).peak == 6


def test_plans_a_trace(instance, capsys):
    instance.write_text(TRACE)
    assert main(["place", str(instance)]) == 0
    printed = capsys.readouterr().out
    assert "peak         1,024 bytes" in printed
    assert "would reserve about 2,097,152 bytes" in printed


def test_options_count_for_a_trace_too(instance, tmp_path, capsys):
    instance.write_text(
        "op,id,size,phase,stream,thread\n"
        "malloc,0,1024,forward 0,0,0\nmalloc,1,512,forward 0,0,0\nfree,0,0,forward 0,0,0\nfree,1,0,forward 0,0,0\n"
    )
    assert main(["place", str(instance), "--capacity", "1535B"]) == 1
    printed = capsys.readouterr().out
    assert "method       two levels: 1 kinds" in printed
    assert "NOT within the capacity of 1,535 bytes: the best peak found is 1,536" in printed
    assert main(["place", str(instance), "--capacity", "1536B", "--method", "greedy"]) == 0
    assert "method       greedy peaks, first fit" in capsys.readouterr().out


def test_plans_a_snapshot(tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    history = []
    for address, stream in ((0, 0), (4096, 7)):  # one after the other, but streams must not share
        for action in ("alloc", "free_requested", "free_completed"):
            history.append({"action": action, "addr": address, "size": 512, "stream": stream})
    segment = {"device": 0, "stream": 0, "address": 0, "total_size": 2**21, "blocks": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    assert main(["place", "--snapshot", str(path), "--method", "greedy"]) == 0
    printed = capsys.readouterr().out
    assert "peak         1,024 bytes" in printed
    assert "not proved optimal" in printed
    assert "PyTorch      had reserved 2,097,152 bytes (2.00 MiB) at most" in printed


def test_every_method_of_the_planner_is_an_option():
    methods = ["auto", *METHODS]
    parser = build_parser()
    assert [parser.parse_args(["place", "step.csv", "--method", name]).method for name in methods] == methods


def test_options_reach_the_planner(instance, monkeypatch):
    calls = []
    done = Placement(Problem(()), (), "stand-in")
    monkeypatch.setattr("memo_hf.planner.placement.place", lambda problem, *given: calls.append(given) or done)
    monkeypatch.setattr("memo_hf.planner.bilevel.plan_step", lambda trace, *given, **named: calls.append(named) or done)
    options = ["--capacity", "1KiB", "--time-limit", "3", "--method", "core"]
    assert main(["place", str(instance), *options]) == 0
    instance.write_text(TRACE)
    assert main(["place", str(instance), *options]) == 0
    assert calls == [(1024, 3.0, "core"), {"time_limit": 3.0, "capacity": 1024, "method": "core"}]


def test_mistakes_are_one_line(tmp_path, capsys):
    hostile = tmp_path / "hostile.pickle"
    hostile.write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")  # calls os.system where it is read by pickle.load
    for command in ([str(tmp_path / "missing.csv")], ["--snapshot", str(hostile)]):
        assert main(["place", *command]) == 2
        error = capsys.readouterr().err
        assert error.startswith("memo-hf place: ") and error.count("\n") == 1


def test_plot(instance, tmp_path):
    pytest.importorskip("matplotlib")
    image = tmp_path / "map.png"
    assert main(["place", str(instance), "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "name"), [("--plot", "map.csv"), ("--plot", "map"), ("--output", "plan.json")])
def test_a_suffix_that_says_another_format_is_a_mistake(option, name, instance, tmp_path, capsys):
    assert main(["place", str(instance), option, str(tmp_path / name)]) == 2
    assert "end the name in" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_plot_that_cannot_be_written_says_so(instance, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["place", str(instance), "--plot", str(tmp_path / "no" / "map.png")]) == 2
    assert "plot: cannot write" in capsys.readouterr().err


def test_starts_without_torch_and_heavy_libraries():
    code = (
        "import sys; from memo_hf.cli import build_parser; build_parser()\n"
        "heavy = {'torch', 'numpy', 'pulp', 'highspy', 'matplotlib', 'ortools', 'omnimalloc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from memo_hf.planner.placement import place; import memo_hf.planner.bilevel, memo_hf.planner.snapshot\n"
        "heavy = {'torch', 'pulp', 'matplotlib', 'ortools', 'omnimalloc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
