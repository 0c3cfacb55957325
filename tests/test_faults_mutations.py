"""The tests can fail: with one line of memo_hf changed, a test that is named here goes red.

Each mutation drops a wait, a reset, a detach, a state that is restored, or moves a boundary by one.
"""

import inspect

import pytest

from memo_hf import patched_stack, session
from memo_hf.layers import (
    ambient,
    attention_saves,
    call,
    chunk_saves,
    layer_mode,
    patch,
    refusals,
    step,
    tokenwise,
    trial,
)
from memo_hf.swap import cpu_threads, engine, group
from tests import (
    test_faults_identity,
    test_faults_input,
    test_faults_lifecycle,
    test_faults_races,
    test_faults_recompute,
    test_faults_state,
)
from tests.harness.mutations import mutate
from tests.harness.sessions import IDS, REBUILD, TOKEN, WHOLE, enabled, small
from tests.tiny_models import gradients

SOME = {**TOKEN, "unswapped_layers": 0}
ALL = {**SOME, "swap_fraction": 1.0}
NONE = {**SOME, "swap_fraction": 0.0}


class red:
    """A test of the suite with its arguments, called with the monkeypatch that it may want."""

    def __init__(self, test, *arguments, **options):
        self.test, self.arguments, self.options = test, arguments, options

    def __call__(self, monkeypatch):
        wanted = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(self.test).parameters else {}
        self.test(*self.arguments, **self.options, **wanted)

    def _key(self):
        return repr((self.test, self.arguments, self.options))

    def __hash__(self):
        return hash(self._key())

    def __eq__(self, other):
        return isinstance(other, red) and self._key() == other._key()


def order(settings, **options):
    """Gradients under late copies: to the bit those of the same chunks kept, nearly those of the plain model."""
    return red(test_faults_races.check_any_order, settings=settings, **options)


def dropout(monkeypatch):
    """Two steps with the same random state: recomputed chunks draw what forward drew."""
    import torch

    found = []
    for settings in ({**NONE, "unswapped_layers": 99}, ALL, NONE, {**NONE, "qkv": "rebuild"}):
        model = small(layers=2, attention_dropout=0.0)
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
            layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Dropout(0.5))
        enabled(model, **settings)
        torch.manual_seed(3)
        found.append(gradients(model, IDS))
    for other in found[1:]:
        test_faults_races.assert_same_bits(other, found[0])


MUTATIONS = {
    # swap engine
    "no wait for a fetch": (
        engine.SwapEngine, "_on_device",
        "self._backend.wait(fetch, buffer)", "pass",
        order(SOME, eagerness=0.1),
    ),
    "no wait before the next offload": (
        engine.SwapEngine, "_let_go",
        "self._backend.wait(copy)", "pass",
        red(test_faults_races.test_rounding_buffers_are_two),
    ),
    "dead blocks are never given back": (
        engine.SwapEngine, "_reap",
        "self._pool.give_back(block)", "pass",
        order(SOME),
    ),
    "the wrong storage of a group": (
        group.SwapGroup, "put",
        "identity = (storage_key(tensor), tensor._version)", "identity = (tensor.shape,)",
        order(SOME),
    ),
    "addresses for identities": (
        group.SwapGroup, "put",
        "storage_key(tensor)", "tensor.untyped_storage().data_ptr()",
        red(test_faults_races.test_an_address_within_a_group),
    ),
    "a version that is not watched": (
        group.SwapGroup, "put",
        "watch=watch", "watch=None",
        red(test_faults_identity.test_a_layer_that_writes_to_its_input),
    ),
    "device copies are not released": (
        group.SwapGroup, "release",
        "stored.device = None", "pass",
        red(test_faults_state.test_device_copies_go_with_their_layer, settings=TOKEN),
    ),
    "a fetch is forgotten with its buffer": (
        group.SwapGroup, "release",
        "engine._retired.append((None, [stored.fetch]))", "pass",
        red(test_faults_races.test_a_layer_whose_backward_does_not_read_what_it_fetched),
    ),
    "the worker does not say that it failed": (
        cpu_threads.CpuThreads, "_raise_failure",
        "failure is not None", "False",
        red(test_faults_state.test_a_copy_that_fails_says_so_and_a_new_session_works),
    ),
    "the worker is not stopped": (
        cpu_threads.CpuThreads, "close",
        "self._worker.jobs.put(None)", "return",
        red(test_faults_state.test_host_memory_and_thread_go_with_disable),
    ),
    # token-wise nodes
    "the boundary is one token late": (
        tokenwise, "cut_into_chunks",
        "(boundary, num_tokens, False)", "(boundary + 1, num_tokens, False)",
        order(SOME),
    ),
    "chunks overlap": (
        tokenwise, "cut_into_chunks",
        "min(start + chunk_tokens, stop)", "min(start + chunk_tokens + 1, stop)",
        order(SOME),
    ),
    "another fraction than asked for": (
        tokenwise, "cut_into_chunks",
        "boundary = round(swap_fraction * num_tokens)", "boundary = round(swap_fraction * num_tokens) - 1",
        red(test_faults_recompute.test_how_much_is_computed_again, *test_faults_recompute.SIX_TOKENS_SWAPPED),
    ),
    "random state is not restored": (ambient.RandomState, "restored", "self._write(self._states)", "pass", dropout),
    "random state stays restored": (
        ambient.RandomState, "restored",
        "self._write(now)", "pass",
        red(test_faults_recompute.test_backward_draws_no_random_numbers, settings="token"),
    ),
    "one gradient for all parameters": (
        tokenwise._ParameterGradients, "add",
        "total.add_(gradient)", "pass",
        order({**NONE, "chunk_size": 8}),
    ),
    "only the first chunk counts": (
        tokenwise._ParameterGradients, "add",
        "self._sums[index] = total.to(wide) + gradient", "pass",
        order(NONE),
    ),
    "input gradients are overwritten": (
        tokenwise._Tokenwise, "backward",
        ".add_(gradient)", ".copy_(gradient)",
        order(NONE),
    ),
    "what is kept is not detached": (
        group.SwapGroup, "put",
        "kept=tensor.detach() if tensor.numel() else tensor.detach().clone()", "kept=tensor",
        red(test_faults_state.test_a_dropped_graph_is_freed_at_once, settings="kept"),
    ),
    "graphs are not freed": (
        tokenwise._Tokenwise, "backward",
        "node.free()", "pass",
        red(test_faults_races.test_a_graph_is_used_twice, settings="token"),
    ),
    "handles are freed though the graph is kept": (
        tokenwise._Tokenwise, "backward",
        "if not keep_graph:", "if True:",
        red(test_faults_races.test_a_graph_is_used_twice, settings="token"),
    ),
    "parameters are swapped": (
        chunk_saves.ChunkSaves, "_pack",
        "if storage in self._of_parameters:", "if False:",
        red(test_faults_identity.test_parameters_and_buffers_never_move, settings="token", autocast=False),
    ),
    "constants are swapped": (
        chunk_saves.ChunkSaves, "_pack",
        "storage in self._stay or", "",
        red(test_faults_identity.test_what_all_layers_share_never_moves_and_stays_alive),
    ),
    "a stale weight is not noticed": (
        chunk_saves._ParameterView, "get",
        "parameter._version != self._version", "False",
        red(test_faults_identity.test_a_weight_that_changes_between_forward_and_backward),
    ),
    # layers
    "rebuilt queries outlive their layer": (
        step.LayerRecord, "end_backward",
        "self.rebuilt.clear()", "pass",
        red(test_faults_state.test_device_copies_go_with_their_layer, settings=REBUILD),
    ),
    "fetched tensors outlive their layer": (
        step.LayerRecord, "end_backward",
        "self.group.release()", "pass",
        red(test_faults_state.test_device_copies_go_with_their_layer, settings=TOKEN),
    ),
    "the last layers are swapped too": (
        step.Step, "layer",
        "index >= self.first_kept", "False",
        red(test_faults_identity.test_bytes_swapped_are_what_the_shapes_say),
    ),
    "queries are rebuilt with another layout": (
        attention_saves._RebuiltView, "get",
        ".as_strided(*self._layout)", "",
        order({**REBUILD, "unswapped_layers": 0}),
    ),
    "a rebuilt key for a query": (
        attention_saves.Rebuilder, "view_of",
        "_RebuiltView(self, position, tensor)", "_RebuiltView(self, 0, tensor)",
        order({**REBUILD, "unswapped_layers": 0}),
    ),
    "finish is cut where project was not": (
        call.LayerCall, "on_tokens",
        "part = tensor[:, start:stop]", "part = tensor[:, : stop - start]",
        order(SOME),
    ),
    "a cache is kept": (
        call.LayerCall, "__init__",
        "None if isinstance(arg, Cache) else arg for name", "arg for name",
        red(test_faults_recompute.test_a_layer_is_given_no_cache),
    ),
    "layer mode does not swap": (layer_mode._InputSaves, "_pack", "!= self._hidden", "!= 0", order(WHOLE)),
    # check, session, refusals
    "arguments may change": (
        trial, "_same_objects",
        "return False", "return True",
        red(test_faults_recompute.test_layers_that_share_through_an_argument, container=list),
    ),
    "no refusal of later layers": (
        patched_stack.PatchedStack, "forward",
        "self._refuse_other_layers()", "pass",
        red(test_faults_lifecycle.test_layers_that_came_later_are_refused, change="added"),
    ),
    "no refusal of checkpointing": (
        refusals, "refuse_what_cannot_be",
        "is True", "is None",
        red(test_faults_lifecycle.test_activation_checkpointing_is_refused_before_and_after, reentrant=False),
    ),
    "patches stay": (
        patch.Patch, "undo",
        "delattr(self.module, self._method)", "pass",
        red(test_faults_lifecycle.test_disable_leaves_the_model_as_it_was_found, family="llama", settings="token"),
    ),
    "copies stay enabled": (
        patch._StandIn, "__reduce_ex__",
        "self.__wrapped__.__reduce_ex__(protocol)", "super().__reduce_ex__(protocol)",
        red(test_faults_lifecycle.test_a_copy_keeps_the_forward_that_was_put_there_before),
    ),
    "the engine stays open": (
        session.Session, "_close_engine",
        "self._engine.close()", "pass",
        red(test_faults_state.test_host_memory_and_thread_go_with_disable),
    ),
    "counters are not reset": (session.Session, "begin_forward", "engine.reset_stats()", "pass", order(SOME)),
    "the running step stays": (
        patched_stack.PatchedStack, "_run",
        "self._running.step = before", "pass",
        red(test_faults_state.test_evaluation_is_untouched_before_and_between_steps),
    ),
    "the budget is not asked": (
        session.Session, "require_host",
        "needed > self.host_budget_bytes", "False",
        red(test_faults_input.test_the_same_in_layer_mode),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_line_is_noticed(name):
    owner, function, line, changed, test = MUTATIONS[name]
    assert_green(test)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutate(monkeypatch, owner, function, line, changed)
        # pytest.fail and pytest.raises raise what is no Exception.
        with pytest.raises((Exception, pytest.fail.Exception)):
            test(monkeypatch)


_green = set()


def assert_green(test):
    """The test passes without a mutation; each is tried once."""
    if test not in _green:
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(monkeypatch)
        _green.add(test)
