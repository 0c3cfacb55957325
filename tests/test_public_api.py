"""The public names, signatures and errors, pinned: a change here is a change for users and goes into the changelog."""

import dataclasses
import inspect

import pytest

import memo_hf
from memo_hf import errors
from memo_hf.session import LayerStats, Session, SessionStats

NAMES = [
    "MemoAccelerator",
    "MemoConfig",
    "MemoError",
    "MemoPlugin",
    "MemoTrainer",
    "MemoTrainerMixin",
    "disable",
    "enable",
    "forecast",
]


def signature(function) -> str:
    return str(inspect.signature(function)).replace("'", "").replace("memo_hf.config.", "")


def fields(cls) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(cls)}


def test_names():
    assert dir(memo_hf) == memo_hf.__all__ == NAMES
    for name in NAMES:
        assert getattr(memo_hf, name) is getattr(memo_hf, name)
    assert memo_hf.__version__


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'Memo'; the public names are .*'MemoConfig'"):
        memo_hf.Memo  # noqa: B018


def test_every_public_name_is_documented():
    for name in NAMES:
        assert len(inspect.getdoc(getattr(memo_hf, name)) or "") > 20, name


def test_config():
    # Not the fields' own types: transformers' HfArgumentParser replaces those in the class.
    assert memo_hf.MemoConfig.__annotations__ == {
        "swap_fraction": "float | None",
        "chunk_size": "int | None",
        "qkv": "str | None",
        "host_memory": "str | None",
        "host_memory_for_others": "str | None",
        "device_memory": "str | None",
        "plan_file": "str | None",
        "min_tokens": "int | None",
        "unswapped_layers": "int",
        "mode": "str",
        "allocator": "str | None",
        "plan_folder": "str | None",
        "chunked_loss": "bool",
    }
    assert dataclasses.asdict(memo_hf.MemoConfig()) == {
        "swap_fraction": None,
        "chunk_size": None,
        "qkv": None,
        "host_memory": None,
        "host_memory_for_others": None,
        "device_memory": None,
        "plan_file": None,
        "min_tokens": None,
        "unswapped_layers": 2,
        "mode": "auto",
        "allocator": None,
        "plan_folder": None,
        "chunked_loss": True,
    }
    assert all(len(field.metadata["help"]) > 40 for field in dataclasses.fields(memo_hf.MemoConfig))
    parameters = inspect.signature(memo_hf.MemoConfig).parameters.values()
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    with pytest.raises(dataclasses.FrozenInstanceError):
        memo_hf.MemoConfig().chunk_size = 1
    assert signature(memo_hf.MemoConfig.from_dict) == "(values: dict) -> MemoConfig"


def test_functions():
    assert signature(memo_hf.enable) == "(model: nn.Module, config: MemoConfig | None = None) -> Session"
    assert signature(memo_hf.disable) == "(model: nn.Module) -> None"


def test_session():
    public = [name for name in vars(Session) if not name.startswith("_")]
    used_by_the_engine = {"engine", "require_host", "begin_pass", "begin_forward", "skip_forward", "end_forward"}
    used_by_the_engine |= {
        "fall_back",
        "note_evaluation",
        "run_whole",
        "layers",
        "host_bytes_for_others",
        "decided",
        "run_report",
    }
    assert sorted(set(public) - used_by_the_engine) == [
        "close",
        "describe",
        "report",
        "stats",
        "swap_fraction",
        "train_with",
    ]
    assert signature(Session.report) == "(self, device_peak_bytes: int | None = None, format: str = text) -> str"
    assert fields(LayerStats) == {"name": "str", "mode": "str", "reason": "str"}
    assert fields(SessionStats) == {
        "layers": "tuple[LayerStats, ...]",
        "phase": "str",
        "swap_fraction": "float",
        "qkv": "str",
        "strategy": "str",
        "binding_limit": "str",
        "chunk_size": "int",
        "planned_bytes": "int",
        "swapped_bytes": "int",
        "prefetched_bytes": "int",
        "total_swapped_bytes": "int",
        "host_bytes": "int",
        "peak_host_bytes": "int",
        "host_reserved_bytes": "int",
        "host_budget_bytes": "int | None",
        "forwards": "int",
        "stock_forwards": "int",
        "total_tokens": "int",
        "serving": "ServingStats",
    }
    documented = inspect.getdoc(SessionStats)
    assert all(f"{name}:" in documented for name in fields(SessionStats))


def test_errors():
    tree = {
        errors.MemoError: RuntimeError,
        errors.ConfigError: errors.MemoError,
        errors.UnsupportedModelError: errors.MemoError,
        errors.HostMemoryError: errors.MemoError,
        errors.DeviceMemoryError: errors.MemoError,
        errors.PlanError: errors.MemoError,
        errors.RankError: errors.MemoError,
    }
    public = {item for item in vars(errors).values() if inspect.isclass(item)}
    assert public == set(tree)
    assert all(issubclass(error, base) and inspect.getdoc(error) for error, base in tree.items())
    assert issubclass(errors.ConfigError, ValueError)
    assert memo_hf.MemoError is errors.MemoError
