"""Plans by shape bucket, made from one measurement, saved and refused."""

import json
import math
import random

import pytest

from memo_hf.errors import PlanError
from memo_hf.planner.layer_costs import Budgets, DevicePeak, LayerCosts
from memo_hf.planner.plan import Measurement, PlanBook, Shape
from memo_hf.planner.swap_fraction import solve_swap_plan

RATES = {"to_host_bytes_per_second": 1e4, "to_device_bytes_per_second": 1e4}
FINGERPRINT = {"model": "llama 1234", "versions": ("0.1.0", "2.13.0"), "device": "cpu", "local_ranks": 1}


def measurement(seq_len=4096) -> Measurement:
    costs = LayerCosts(
        num_layers=8,
        num_kept=2,
        project_forward_seconds=0.1,
        attend_forward_seconds=0.4,
        finish_forward_seconds=0.3,
        project_backward_seconds=0.2,
        attend_backward_seconds=1.0,
        finish_backward_seconds=0.6,
        input_bytes=100.0,
        output_bytes=110.0,
        qkv_bytes=150.0,
        others_bytes=900.0,
        device_peaks=(DevicePeak(when="w", treatment="swap", fixed_bytes=5000.0, bytes_per_fraction=1800.0),),
    )
    return Measurement(
        shape=Shape(1, seq_len), layers=(costs,), windows=(None,), static_bytes=1000.0, rest_seconds=0.5, **RATES
    )


def plan_of(seq_len=4096, host=4000.0):
    limits = Budgets(host_bytes=host, to_host_bytes_per_second=1e4, to_device_bytes_per_second=1e4)
    return solve_swap_plan(measurement().layers_at(Shape(1, seq_len)), limits)


@pytest.mark.parametrize("seq_len", [1, 255, 256, 257, 2048, 2049, 5000, 65536, 65537, 1_000_000])
def test_a_bucket_is_at_most_an_eighth_longer_and_never_shorter(seq_len):
    bucket = Shape(2, seq_len).bucket()
    assert bucket.batch == 2
    assert seq_len <= bucket.seq_len <= max(256, seq_len * 1.125 + 256)
    assert bucket.bucket() == bucket


def test_random_lengths_share_few_plans():
    # case 109
    rng, book = random.Random(0), PlanBook(FINGERPRINT, measurement())
    for _ in range(200):
        shape = Shape(1, rng.randint(4096, 8192))
        if book.get(shape) is None:
            book.put(shape, plan_of(shape.bucket().seq_len, host=1e6))
    assert len(book) <= 9


def test_another_length_is_planned_from_one_measurement():
    (short,) = measurement().layers
    (long,) = measurement().layers_at(Shape(1, 16384))
    assert long.finish_forward_seconds == pytest.approx(4 * short.finish_forward_seconds)
    assert long.attend_forward_seconds == pytest.approx(16 * short.attend_forward_seconds)
    assert long.others_bytes == 4 * short.others_bytes
    assert long.device_peaks[0].fixed_bytes == 1000 + 4 * 4000
    assert measurement().rest_seconds_at(Shape(2, 4096)) == 1.0


def test_more_sequences_cost_in_proportion():
    (two,) = measurement().layers_at(Shape(2, 4096))
    assert two.attend_forward_seconds == pytest.approx(0.8)


def test_a_window_bounds_the_growth_of_attention():
    whole = measurement()
    windowed = Measurement(
        shape=whole.shape, layers=whole.layers, windows=(1024,), static_bytes=0.0, rest_seconds=0.0, **RATES
    )
    (long,) = windowed.layers_at(Shape(1, 65536))
    assert long.attend_forward_seconds == pytest.approx(0.4 * 16 * (1 - 1 / 128) / (1 - 1 / 8))


def test_a_saved_book_comes_back_equal(tmp_path):
    book = PlanBook(FINGERPRINT, measurement())
    book.put(Shape(1, 4096), plan_of())
    book.put(Shape(1, 9000), plan_of(9216))
    book.save(tmp_path / "plan.json")
    again = PlanBook.load(tmp_path / "plan.json", FINGERPRINT)
    assert again.measurement == book.measurement
    assert again.get(Shape(1, 4000)) == plan_of()
    assert again.get(Shape(1, 9100)) == plan_of(9216)
    assert again.get(Shape(1, 20000)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "llama 9999", "model was 'llama 1234' when it was made and is 'llama 9999' now"),
        ("versions", ("0.1.0", "2.14.0"), "versions was"),
        ("local_ranks", 8, "local_ranks was 1 when it was made and is 8 now"),
        ("new", True, "new was None"),
    ],
)
def test_a_stale_book_is_refused_by_field(tmp_path, field, value, words):
    PlanBook(FINGERPRINT, measurement()).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="is refused: " + words):
        PlanBook.load(tmp_path / "plan.json", {**FINGERPRINT, field: value})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "fingerprint": 3}'])
def test_a_broken_file_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="cannot be read .* delete it"):
        PlanBook.load(tmp_path / "plan.json", FINGERPRINT)


def test_another_format_is_refused(tmp_path):
    PlanBook(FINGERPRINT).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(PlanError, match="its format is 99"):
        PlanBook.load(tmp_path / "plan.json", FINGERPRINT)


def test_what_is_saved_is_plain_json(tmp_path):
    book = PlanBook(FINGERPRINT)
    book.put(Shape(1, 4096), plan_of(host=math.inf))
    book.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["plans"][0]["seq_len"] == 4096
