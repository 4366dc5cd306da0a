"""Ctrl-C while something is replaced for a forward, wherever it comes: nothing stays replaced."""

import sys
from contextlib import contextmanager, nullcontext
from itertools import count

import pytest
from transformers import AttentionInterface, AttentionMaskInterface

from trl_fused_grpo import _utils
from trl_fused_grpo._utils import temporary_attr
from trl_fused_grpo.modeling.attention import packed as packed_attention
from trl_fused_grpo.modeling.attention.watch import WatchedCall, running_call
from trl_fused_grpo.modeling.layers import compiled as compiled_layers
from trl_fused_grpo.modeling.layers import unpacked as unpacked_layers

from .built import built


def compiled(model):
    layers, _ = compiled_layers.layers_to_compile(model)
    return compiled_layers.compiled_layers(model, layers, WatchedCall(lengths=[3, 4]))


REPLACE = {
    "attention": lambda model: packed_attention.watched_call(WatchedCall(), model),
    "unpacked-layers": lambda model: unpacked_layers.unpacking(model, WatchedCall(lengths=[3, 4])),
    "compiled": compiled,
    "walks": lambda _: _utils.modules_as_they_are(),
    "attribute": lambda model: temporary_attr(model, "forward", nullcontext),
}
VARIABLES = (running_call, _utils._walks)


def found_in(model):
    """Whatever is replaced in a model, in its file, in transformers' tables and in the context."""
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func")
    modules = [[vars(module).get(name) for name in names] for module in model.modules()]
    file = sys.modules[type(model).__module__]
    functions = [file.apply_rotary_pos_emb, file.eager_attention_forward]
    tables = [AttentionInterface()["sdpa"], *(AttentionMaskInterface()[name] for name in ("sdpa", "eager"))]
    return modules, functions, tables, [variable.get() for variable in VARIABLES]


@contextmanager
def ctrl_c(number):
    """
    Ctrl-C in this package, at the place of this number at which Python heeds it: where a function begins, or one that
    is written in C has returned. Gives a list, which stays empty where there are not so many.
    """
    places, came = iter(range(number)), []

    def profile(frame, event, _):
        is_here = event in ("call", "c_return") and frame.f_globals["__name__"].startswith("trl_fused_grpo.")
        if is_here and not came and next(places, None) is None:
            came.append(number)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield came
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("enter", REPLACE.values(), ids=REPLACE)
def test_an_interrupt_while_something_is_replaced_leaves_nothing_replaced(enter):
    model = built("lfm2")
    before = found_in(model)
    with enter(model):
        assert found_in(model) != before
    for number in count():
        with ctrl_c(number) as came, enter(model):
            sys.setprofile(None)  # what ends it is not interrupted
        assert found_in(model) == before
        if not came:
            break
    assert number > 1


@pytest.mark.nightly
def test_functions_that_an_interrupt_leaves_when_a_call_ends_are_given_back_later(monkeypatch):
    """There it comes in a callback, where Python drops it."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    model = built("lfm2")
    before = found_in(model)
    for number in count():
        call = WatchedCall()
        with packed_attention.watched_call(call, model):
            pass
        with ctrl_c(number) as came:
            del call
        packed_attention.uninstall_attention()
        assert found_in(model) == before
        if not came:
            break
    assert number > 1
