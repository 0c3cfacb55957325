"""Problems, placements, their files, and the independent check."""

import pytest

from memo_hf.errors import PlanError
from memo_hf.planner.problem import Buffer, Placement, Problem, read_placement, read_problem, write_placement
from memo_hf.planner.verify import verify

# The picture in memo_hf/planner/problem.py.
PICTURE = Problem((Buffer("a", 0, 4, 4), Buffer("b", 2, 6, 2), Buffer("c", 4, 8, 4)))


def test_lower_bound_counts_half_open_lifetimes():
    assert PICTURE.lower_bound == 6
    assert Problem((Buffer("a", 0, 4, 4), Buffer("c", 4, 8, 4))).lower_bound == 4
    assert Problem(()).lower_bound == 0


def test_placement_says_how_good_it_is():
    placement = Placement(PICTURE, (0, 4, 0), "by hand")
    assert (placement.peak, placement.lower_bound, placement.gap, placement.proved) == (6, 6, 0.0, True)
    high = Placement(PICTURE, (0, 10, 0), "by hand")
    assert (high.peak, high.gap, high.proved) == (12, 1.0, False)


@pytest.mark.parametrize("lower, upper, size", [(3, 3, 1), (4, 3, 1), (0, 1, 0), (0, 1, -5)])
def test_impossible_buffers_are_refused(lower, upper, size):
    with pytest.raises(PlanError, match="'x'"):
        Buffer("x", lower, upper, size)


def test_repeated_ids_and_missing_offsets_are_refused():
    with pytest.raises(PlanError, match="'a' occurs twice"):
        Problem((Buffer("a", 0, 1, 1), Buffer("a", 1, 2, 1)))
    with pytest.raises(PlanError, match="1 offsets for 3 buffers"):
        Placement(PICTURE, (0,), "by hand")


def test_aligned_sizes():
    aligned = PICTURE.aligned(512)
    assert [buffer.size for buffer in aligned.buffers] == [512, 512, 512]
    assert Problem((Buffer("a", 0, 1, 1024),)).aligned(512).buffers[0].size == 1024


def test_files_round_trip(tmp_path):
    path = tmp_path / "plan.csv"
    write_placement(Placement(PICTURE, (0, 4, 0), "by hand"), path)
    assert path.read_text() == "id,lower,upper,size,offset\na,0,4,4,0\nb,2,6,2,4\nc,4,8,4,0\n"
    assert read_problem(path) == PICTURE
    assert read_placement(path).offsets == (0, 4, 0)


def test_columns_come_in_any_order(tmp_path):
    path = tmp_path / "problem.csv"
    path.write_text("size, upper, lower, alignment, id\n4, 4, 0, 1, a\n")
    assert read_problem(path).buffers == (Buffer("a", 0, 4, 4),)


@pytest.mark.parametrize(
    "text, message",
    [
        ("id,lower,size\n", r"lacks the columns \['upper'\]"),
        ("", "lacks the columns"),
        ("id,lower,upper,size\na,0,4,x\n", "line 2"),
        ("id,lower,upper,size\na,0,4,4\nb,5\n", "line 3"),
        ("id,lower,upper,size\na,4,4,4\n", "line 2.*empty"),
    ],
)
def test_broken_files_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "problem.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"problem.csv.*{message}"):
        read_problem(path)


def test_verify_accepts_a_right_plan():
    placement = Placement(PICTURE, (0, 4, 0), "by hand")
    assert verify(placement, capacity=6) is placement


def test_verify_names_both_culprits():
    with pytest.raises(PlanError, match=r"'a'.*\[0, 4\).*'b'.*\[3, 5\).*share bytes") as error:
        verify(Placement(PICTURE, (0, 3, 0), "by hand"))
    assert "'c'" not in str(error.value)


def test_verify_sees_every_kind_of_overlap():
    inside = Problem((Buffer("outer", 0, 9, 100), Buffer("inner", 3, 4, 1)))
    for offset in (0, 50, 99):
        with pytest.raises(PlanError, match="'outer'.*'inner'|'inner'.*'outer'"):
            verify(Placement(inside, (0, offset), "by hand"))
    verify(Placement(inside, (0, 100), "by hand"))
    verify(Placement(inside, (1, 0), "by hand"))
    twins = Problem((Buffer("x", 0, 2, 8), Buffer("y", 1, 3, 8), Buffer("z", 2, 4, 8)))
    with pytest.raises(PlanError, match="'x'.*'y'"):
        verify(Placement(twins, (0, 0, 8), "by hand"))


def test_verify_sees_what_leaves_the_arena():
    with pytest.raises(PlanError, match="'b'.*capacity of 5"):
        verify(Placement(PICTURE, (0, 4, 0), "by hand"), capacity=5)
    with pytest.raises(PlanError, match="'c'.*below the arena"):
        verify(Placement(PICTURE, (0, 4, -4), "by hand"))
