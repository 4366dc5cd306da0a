"""What projections that share an input keep of it, for how long, and who sees the input itself."""

import gc
import sys
import threading
from contextlib import contextmanager, nullcontext
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.modeling.built import built
from tests.modeling.projections import WIDTH, Projections
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, kernels_on
from trl_fused_grpo.modeling.shared_casts import SharedInput, projections_in


def test_an_input_that_changed_meanwhile_is_cast_anew():
    shared, modules = SharedInput(), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, WIDTH)
            casts = [shared.cast(module, x) for module in modules]
        assert [cast.data_ptr() for cast in casts] == [casts[0].data_ptr()] * 3
        assert all(torch.equal(cast, x.bfloat16()) for cast in casts)
        first = shared.cast(modules[0], x.add_(1))
        assert torch.equal(first, x.bfloat16())
        x.mul_(2)
        assert shared.cast(modules[1], x) is x  # the first that sees it: autocast casts it


def test_who_stops_asking_costs_nothing_but_a_cast():
    shared, modules = SharedInput(), [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for asking in (3, 1, 2, 4):
            x = torch.randn(2, WIDTH)
            casts = [shared.cast(module, x) for module in modules[:asking]]
            assert all(torch.equal(cast.bfloat16(), x.bfloat16()) for cast in casts)
        assert casts[3] is x  # a fourth was not expected


def test_casts_that_nobody_asked_for_are_let_go_with_the_forward():
    model = built("qwen3")
    attention = model.model.layers[0].self_attn
    casts = []
    with (
        kernels_on(),
        compiled_forwards(model),
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
    ):
        for uses in (3, 1):
            x = torch.randn(2, attention.q_proj.in_features)
            for module in (attention.q_proj, attention.k_proj, attention.v_proj)[:uses]:
                module(x)
        shared = vars(attention.q_proj)["forward"].shared
        casts = [ref(cast) for cast in shared._round._casts]
        assert len(casts) == 2
        del shared
    assert [cast() for cast in casts] == [None, None]


def test_a_projection_that_was_replaced_is_let_go_and_the_new_one_shares():
    model = built("qwen3")
    attention = model.model.layers[0].self_attn
    with kernels_on(), compiled_forwards(model):
        assert "forward" in vars(attention.q_proj)
    old = ref(attention.q_proj)
    attention.q_proj = nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    with kernels_on(), compiled_forwards(model):
        assert "forward" in vars(attention.q_proj)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("change", ["instance", "class", "function", "subclass"])
def test_replaced_projections_see_the_input_itself(change):
    model = built("qwen3")
    attention = model.model.layers[0].self_attn
    seen = []

    def watch(*args, **kwargs):
        seen.append(next(tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)))
        return torch.zeros(1, 2, attention.q_proj.out_features)

    class Own(nn.Linear):
        forward = watch

    @contextmanager
    def of_another_class():
        attention.q_proj.__class__ = Own
        yield
        attention.q_proj.__class__ = nn.Linear

    target = {
        "instance": lambda: mock.patch.object(attention.q_proj, "forward", watch, create=True),
        "class": lambda: mock.patch.object(nn.Linear, "forward", watch),
        "function": lambda: mock.patch.object(nn.functional, "linear", watch),
        "subclass": of_another_class,
    }[change]
    x = torch.randn(1, 2, attention.q_proj.in_features)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with kernels_on(), compiled_forwards(model):
            attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
        with target(), kernels_on(), compiled_forwards(model):
            attention.q_proj(x)
    assert seen == [torch.float32]


class Own(torch.Tensor):
    """A weight that computes in its own way."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            dtypes.append(args[0].dtype)
        return super().__torch_function__(function, types, args, kwargs or {})


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


dtypes = []


@pytest.mark.parametrize("seen_by", [Own, Functions, Operations])
def test_who_sees_what_projections_compute_sees_what_separate_ones_do(seen_by):
    module = Projections(3)
    if seen_by is Own:
        for name in module.parts:
            part = getattr(module, name)
            part.weight = nn.Parameter(part.weight.detach().as_subclass(Own), requires_grad=False)
    counts = []
    for share in (False, True):
        forwards = list(projections_in(module)) if share else []
        for forward in forwards:
            forward.module.forward = forward
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), nullcontext() if seen_by is Own else seen_by():
            for _ in range(2):
                dtypes.clear()
                module(torch.ones(2, WIDTH))
        counts.append((len(dtypes), set(dtypes)))
    assert counts[0] == counts[1]
    assert torch.float32 in counts[0][1]


def test_threads_that_run_one_model_get_casts_of_their_own():
    shared, modules = SharedInput(), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    wrong = []

    def ask(value):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for i in range(2000):
                x = torch.full((1,), value + i % 7)
                casts = [shared.cast(module, x) for module in modules]
                wrong.extend(cast for cast in casts if float(cast) != value + i % 7)

    threads = [threading.Thread(target=ask, args=(100.0 * n,)) for n in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_factors_of_several_adapters_share_nothing():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(built("qwen3"), peft.LoraConfig(target_modules=["q_proj", "up_proj", "gate_proj"]))
    model.add_adapter("reference", peft.LoraConfig(target_modules=["q_proj", "up_proj", "gate_proj"]))
    layers = model.base_model.model.model.layers
    names = {module: name for name, module in layers.named_modules()}
    found = {names[forward.module] for layer in layers for forward in projections_in(layer)}
    assert found == {f"{i}.self_attn.{name}" for i in range(len(layers)) for name in ("k_proj", "v_proj", "o_proj")}
