"""What a run shows: its first line, the progress bar, the loggers, and the report as text, JSON and one HTML page."""

import gc
import json
import logging
import re
from html.parser import HTMLParser

import pytest
import torch
from adapters import lora
from exactness import enabled
from tiny_models import random_ids, tiny
from trainer_runs import LAYERS, MEMO, arguments, random_rows, tiny_llama
from transformers import AutoModelForCausalLM, ProgressCallback

import memo_hf
from memo_hf import MemoConfig, MemoTrainer
from memo_hf.allocator.meter import AllocatorMeter
from memo_hf.allocator.peak_watch import PeakWatch
from memo_hf.errors import ConfigError, MemoError
from memo_hf.report.run_plots import figures

IDS = random_ids(2, 64)


def step(model, ids=IDS):
    model(input_ids=ids, labels=ids).loss.backward()


def test_the_first_line_says_all_that_is_known(caplog):
    model = tiny("llama", num_hidden_layers=3)
    with caplog.at_level(logging.INFO, "memo_hf"), enabled(model, swap_fraction=0.5, host_memory="64MiB") as session:
        caplog.clear()
        step(model)
        step(model)
        swapped = session.stats.swapped_bytes
    (line,) = [record.message for record in caplog.records if "forecast for" in record.message]
    assert line.startswith("memo_hf: 3 layers in token mode; swap fraction 0.5, q, k, v swapped; decided by swap_f")
    assert "host budget 64.00 MiB; forecast for 2 x 64 tokens" in line
    assert f"{memo_hf.units.format_bytes(swapped)} swapped" in line  # the forecast of bytes is exact here


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the model may still move to the accelerator")
def test_on_a_cpu_the_limit_is_known_from_the_start(caplog, capsys):
    with caplog.at_level(logging.INFO, "memo_hf"):
        session = memo_hf.enable(tiny("llama", num_hidden_layers=3))
    assert "decided by the CPU, where fraction 0 takes the least memory" in caplog.text
    assert "nothing yet" not in caplog.text
    assert session.stats.phase == "running"
    session.close()
    with enabled(tiny("llama"), device_memory="1GiB") as session:  # then it is solved for
        assert session.stats.phase == "measuring"
        assert "decided by nothing yet: the first training step is measured" in session.describe()
    assert capsys.readouterr().out == ""  # plain `enable` prints nothing


def test_json_has_every_figure():
    model = tiny("llama", num_hidden_layers=3)
    with enabled(model, swap_fraction=0.25, unswapped_layers=1) as session:
        step(model)
        report, stats, text = json.loads(session.report(format="json")), session.stats, session.report()
        assert session.report(format="text") == text
        with pytest.raises(ConfigError, match="format is 'xml'; it must be one of"):
            session.report(format="xml")
    assert report["swapped_bytes"] == stats.swapped_bytes == stats.planned_bytes
    assert report["forecast"]["host_bytes"] == sum(report["forecast"]["host_parts"].values()) == stats.swapped_bytes
    assert report["forecast"]["device_bytes"] == sum(report["forecast"]["device_parts"].values())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert report["forecast"]["device_parts"]["weights and states"] == weights
    assert report["compared"] == [
        {"what": "host bytes", "unit": "B", "forecast": stats.swapped_bytes, "measured": stats.swapped_bytes}
    ]
    assert report["total_tokens"] == IDS.numel()
    shares = [(layer["swapped"], layer["kept"], layer["recomputed"], layer["whole"]) for layer in report["layers"]]
    assert shares == [(0.25, 0, 0.75, 0), (0.25, 0, 0.75, 0), (0, 0.25, 0.75, 0)]


def test_layers_in_layer_mode_are_recomputed_whole():
    model = tiny("llama", num_hidden_layers=2)
    with enabled(model, mode="layer") as session:
        step(model)
        layers = session.run_report().layers
    assert [(layer.swapped, layer.kept, layer.recomputed, layer.whole) for layer in layers] == [(0, 0, 0, 1)] * 2


class _Page(HTMLParser):
    """Counts tags, keeps headings, and notes what the page would load from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.headings, self.loaded, self.ids = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        links = [attributes.get(name) or "" for name in ("src", "href", "xlink:href")]
        self.loaded += [link for link in links if link and not link.startswith(("#", "data:"))]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("h1", "h2") and data.strip():
            self.headings.append(data)


def test_the_page_has_its_plots_inside():
    pytest.importorskip("matplotlib")
    model = tiny("llama", num_hidden_layers=3)
    with enabled(model, swap_fraction=0.5) as session:
        step(model)
        page = session.report(device_peak_bytes=10**6, format="html")
        drawn = figures(session.run_report(device_peak_bytes=10**6))
    parsed = _Page(page)
    assert parsed.headings[:4] == [
        "A run under memo_hf",
        "Bytes by part",
        "Device peak with and without memo_hf",
        "What becomes of each layer's tokens",
    ]
    assert parsed.tags.count("svg") == 4
    assert parsed.loaded == [] and len(parsed.ids) == len(set(parsed.ids))
    referred = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', page))
    assert referred <= set(parsed.ids)
    bars = drawn["What becomes of each layer's tokens"].axes[0].patches
    assert sorted(bar.get_height() for bar in bars) == [0, 0, 0] + [0.5] * 6
    device, host = drawn["Bytes by part"].axes
    assert sum(bar.get_height() for bar in host.patches) * 2**20 == pytest.approx(session.stats.planned_bytes)


def test_the_address_map_is_drawn_where_addresses_are_planned(tmp_path):
    model = tiny("llama", num_hidden_layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with enabled(model, swap_fraction=0.5, allocator="planned", plan_folder=str(tmp_path)) as session:
        for number in range(4):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                assert session.serving.address_map is None
                assert session.serving.finish_planning(120)
        placement = session.serving.address_map
        assert placement.peak == session.stats.serving.arena_bytes
        assert placement.peak >= placement.lower_bound > 0
        assert "Planned addresses of a step" in figures(session.run_report())


def test_the_bar_shows_phases_rate_and_peak(tmp_path, monkeypatch):
    shown = []

    class Bar(ProgressCallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)
            monkeypatch.setattr(self.training_bar, "set_postfix_str", shown.append)

    settings = dict(chunk_size=8, device_memory="1GiB", min_tokens=0)  # the fraction is solved for
    args = arguments(tmp_path, disable_tqdm=False)
    trainer = MemoTrainer(model=tiny_llama(), args=args, train_dataset=random_rows(), memo=settings)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train()
    assert shown[0] == "memo_hf: measuring the first step"
    assert re.fullmatch(r"memo_hf: measured, solving next, [\d,]+ tokens/s, process peak [\d.]+ [MG]iB", shown[1])
    assert re.fullmatch(r"memo_hf: swap fraction [\d.]+, [\d,]+ tokens/s, process peak [\d.]+ [MG]iB", shown[-1])
    assert not any(type(callback).__name__ == "RunFigures" for callback in trainer.callback_handler.callbacks)


def test_tensorboard_gets_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = arguments(tmp_path, report_to="tensorboard")
    trainer = MemoTrainer(model=tiny_llama(), args=args, train_dataset=random_rows(), memo=MEMO)
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    values = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    swapped = values["train/memo/swapped_gib"]
    assert len(swapped) == 3
    assert swapped == pytest.approx([trainer.memo_stats.planned_bytes / 2**30] * 3)
    assert values["train/memo/swap_fraction"] == [0.5] * 3
    assert all(rate > 0 for rate in values["train/memo/tokens_per_second"])
    assert all(peak > 0 for peak in values["train/memo/process_peak_gib"])


def test_a_trainer_prints_the_line_once_and_saves_the_report(tmp_path, capsys):
    trainer = MemoTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=random_rows(), memo=MEMO)
    with pytest.raises(MemoError, match="call train\\(\\) first"):
        trainer.save_memo_report(tmp_path / "report.json")
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count(f"memo_hf: {LAYERS} layers in token mode") == 1
    swapped = memo_hf.units.format_bytes(trainer.memo_stats.swapped_bytes)
    assert f"memo_hf: the first step swapped {swapped} of {swapped} planned" in printed  # case 121
    for suffix in ("txt", "JSON", "json", "html"):
        trainer.save_memo_report(tmp_path / f"report.{suffix}")
    assert (tmp_path / "report.txt").read_text() == trainer.memo_report
    assert json.loads((tmp_path / "report.json").read_text())["forwards"] == 3
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    trainer.save_memo_report(tmp_path / "no" / "folder" / "metered.txt", device_peak_bytes=2 * 10**6)
    metered = (tmp_path / "no" / "folder" / "metered.txt").read_text()
    assert ", measured 1.91 MiB" in metered and "not measured" not in metered
    assert ", not measured; to have it beside" in trainer.memo_report
    assert "trainer.save_memo_report(path, meter.peak_with(model))" in trainer.memo_report
    for name in ("report.md", "report"):
        with pytest.raises(ConfigError, match="end the name in"):
            trainer.save_memo_report(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ConfigError, match=r"report.pdf'; end the name in .html or .json or .txt"):
        trainer.save_memo_report(tmp_path / "report.pdf")


@pytest.mark.parametrize("setting", [dict(plan_file="x.json"), dict(device_memory="1GiB")], ids=str)
def test_a_setting_without_effect_is_an_error(setting):  # case 121
    with pytest.raises(ConfigError, match="has no effect beside swap_fraction=0.5"):
        MemoConfig(swap_fraction=0.5, **setting)


LOSSES = ("whole logits", "a chunked loss")


def test_the_peak_has_beside_it_what_would_run_instead():
    vocab = 128
    model = tiny("llama", num_hidden_layers=4, vocab_size=vocab)
    held = sum(p.nbytes for p in model.parameters())
    with enabled(model, swap_fraction=0.0, unswapped_layers=1) as session:
        step(model)
        report, text = json.loads(session.report(format="json")), session.report()
        with_peak = session.report(device_peak_bytes=10**6)
    peak, without = report["forecast"]["device_bytes"], report["forecast"]["device_bytes_without"]
    for loss in LOSSES:
        assert held < peak < without[f"activation checkpointing with {loss}"] < without[f"plain training with {loss}"]
    said = ", ".join(f"{name} {memo_hf.units.format_bytes(size)}" for name, size in without.items())
    assert f"without memo_hf, by forecast: {said}" in text and said in with_peak
    hint = f"device peak: forecast {memo_hf.units.format_bytes(peak)}, not measured; to have it beside"
    assert hint in text and hint not in with_peak


def test_on_a_gpu_the_peak_is_torchs_where_it_is_of_these_steps(monkeypatch):
    counted = [100]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counted[0])
    peak, gpu = PeakWatch(), torch.device("cuda", 0)
    peak.begin_step(torch.device("cpu"), (1, 64))
    assert peak.num_bytes is None
    peak.begin_step(gpu, (1, 64))
    assert peak.num_bytes is None  # what was before is not of these steps
    counted[0] = 250
    peak.begin_step(gpu, (1, 64))
    assert peak.num_bytes == 250
    peak.begin_step(gpu, (1, 32))
    assert peak.num_bytes is None  # a longer batch took more
    counted[0] = 300
    assert peak.num_bytes == 300
    peak.begin_other()
    assert peak.num_bytes is None
    counted[0] = 400
    peak.begin_step(gpu, (1, 32))
    assert peak.num_bytes is None  # the others took that


def test_the_forecast_has_the_optimizers_states(tmp_path):
    """Beside what a meter saw of a model that transformers has mapped from its file."""
    gc.collect()  # what goes while the meter runs would be taken off
    wide = dict(num_hidden_layers=3, hidden_size=256, intermediate_size=1024)  # states are most of what there is
    tiny("llama", **wide).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    said = []
    with enabled(model, swap_fraction=0.0) as session:
        session.say = said.append
        with AllocatorMeter() as meter:
            optimizer = torch.optim.AdamW(model.parameters())
            peaks = []
            for _ in range(2):
                step(model)
                peaks.append(session.run_report().forecast.device_bytes)
                optimizer.step()
                optimizer.zero_grad()
        report = session.run_report(meter.peak_with(model))
    states = 2 * sum(p.nbytes for p in model.parameters())
    (line,) = said
    assert line.endswith("the optimizer's states not counted yet")
    assert peaks[1] - peaks[0] == pytest.approx(states, rel=0.001)  # and a counter for each parameter
    (found,) = [figures for figures in report.compared if figures[0] == "device peak"]
    assert found[2] == pytest.approx(found[3], rel=0.1)


def test_the_report_takes_the_peak_of_the_device(monkeypatch):
    monkeypatch.setattr(PeakWatch, "num_bytes", 10**6)
    model = tiny("llama", num_hidden_layers=3)
    with enabled(model, swap_fraction=0.5) as session:
        step(model)
        assert ", measured 976.6 KiB" in session.report() and "not measured" not in session.report()
        assert ", measured 1.91 MiB" in session.report(device_peak_bytes=2 * 10**6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # its name in transformers before 5.20
@pytest.mark.parametrize(
    ("name", "vocab", "adapts"), [("llama", 1024, False), ("qwen3", 128, False), ("llama", 1024, True)]
)
def test_what_would_run_instead_is_forecast_to_a_tenth(name, vocab, adapts):
    gc.collect()  # what goes while the meter runs would be taken off
    with AllocatorMeter() as meter:
        model = tiny(name, num_hidden_layers=4, vocab_size=vocab, hidden_size=64, intermediate_size=176)
        if adapts:
            model = lora(model, target_modules=["q_proj", "v_proj"])
        ids = random_ids(1, 512)
        measured = {}
        for strategy, checkpoints in (("plain training", False), ("activation checkpointing", True)):
            if checkpoints:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train().zero_grad(set_to_none=True)
            meter.reset_peak()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            measured[f"{strategy} with whole logits"] = meter.peak_bytes - meter.start_bytes
        model.gradient_checkpointing_disable()
        model.zero_grad(set_to_none=True)
        with enabled(model, swap_fraction=0.0) as session:
            model(input_ids=ids, labels=ids).loss.backward()
            forecast = session.run_report().forecast.device_bytes_without
    assert {name: forecast[name] for name in measured} == pytest.approx(measured, rel=0.1)
    assert set(forecast) == {name.replace("whole logits", loss) for name in measured for loss in LOSSES}


@pytest.fixture
def one_thread():
    """Attention on a CPU holds something for each of its threads, which is much beside a small model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("vocab", "width"), [(128, 128), (4096, 64)])
def test_the_peak_is_forecast_to_a_twentieth(one_thread, vocab, width):
    """In the layers, and in a loss whose logits in chunks are most of what there is."""
    gc.collect()  # what goes while the meter runs would be taken off
    with AllocatorMeter() as meter:
        model = tiny("llama", num_hidden_layers=3, vocab_size=vocab, hidden_size=width, intermediate_size=352)
        with enabled(model, swap_fraction=0.0) as session:
            step(model, random_ids(1, 2048))
            forecast = session.run_report().forecast
    assert (forecast.moment == "loss") == (vocab == 4096)
    assert forecast.device_bytes == pytest.approx(meter.peak_bytes - meter.start_bytes, rel=0.05)


def test_untouched_batches_are_told_in_plain_words(tmp_path, monkeypatch, capsys):
    said = "untouched: 1 of 3 batches was shorter than min_tokens=64"
    model = tiny("llama", num_hidden_layers=3)
    with enabled(model, swap_fraction=0.5, min_tokens=64) as session:
        step(model)
        step(model)
        assert "untouched" not in session.report() and json.loads(session.report(format="json"))["untouched"] is None
        short = random_ids(1, 32)
        model(input_ids=short, labels=short).loss.backward()
        assert f"\n  {said}\n" in session.report()
        assert re.search(r"off by -\d+%, or the peak was that of an untouched batch\n", session.report(10**9))
        assert json.loads(session.report(format="json"))["untouched"] == said
        pytest.importorskip("matplotlib")
        assert said in session.report(format="html")
    shown = []

    class Bar(ProgressCallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)
            monkeypatch.setattr(self.training_bar, "set_postfix_str", shown.append)

    args = arguments(tmp_path, disable_tqdm=False)
    trainer = MemoTrainer(model=tiny_llama(), args=args, train_dataset=random_rows(), memo=MemoConfig())
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train()
    assert shown[-1].startswith("memo_hf: untouched: 3 of 3 batches were shorter than min_tokens=2,048, ")
    said = "untouched: 3 of 3 batches were shorter than min_tokens=2,048"
    assert trainer.memo_report == f"memo_hf ran on no batch ({said}). MemoConfig(min_tokens=0) runs it on all"
    trainer.save_memo_report(tmp_path / "report.html")
    assert f"<pre>{trainer.memo_report}</pre>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", ["plan.yaml", "plan", "plan.json.gz"])
def test_a_plan_file_is_json(name):
    with pytest.raises(ConfigError, match="plan_file, written as JSON, is '.*'; end the name in .json"):
        MemoConfig(plan_file=name)
    assert MemoConfig(plan_file="a.b/plan.json").plan_file == "a.b/plan.json"
