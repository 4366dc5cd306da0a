"""Projections that share an input: their products, and its gradient, are those of separate casts, to the bit."""

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

from tests.modeling.test_compiled_modules import built
from tests.modeling.test_layer_kernels import gradients, with_kernels
from tests.ops.test_triton_kernels import DEVICE
from trl_fused_grpo.modeling.compiled_modules import compiled_forwards, compiling
from trl_fused_grpo.modeling.shared_casts import SharedInput, projections_in
from trl_fused_grpo.ops.layer_functions import SharedCast


WIDTH = 24


class Projections(nn.Module):
    """Several of one input, and one of what they return."""

    def __init__(self, count, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(count)
        self.parts = [f"part{i}" for i in range(count)]
        for name in self.parts:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "part1", dtype=dtype))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        total = 0
        for name in self.parts:
            total = total + getattr(self, name)(x) ** 2
        return self.last(total.to(x.dtype))


def run(module, times=2, x=None, share=True, **autocast):
    """What the last of several runs returns, and every gradient of it; how many casts were shared in it."""
    forwards = list(projections_in(module)) if share else []
    with mock.patch.object(SharedCast, "apply", side_effect=SharedCast.apply) as shared:
        for _ in range(times):
            module.zero_grad()
            shared.reset_mock()
            leaf = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE) if x is None else x
            leaf = leaf.detach().requires_grad_()
            for forward in forwards:
                forward.module.forward = forward
            with torch.autocast(DEVICE, torch.bfloat16, **autocast):
                result = module(leaf * 1)
            for forward in forwards:
                del forward.module.forward
            (result.float() * result.float().cos().detach()).sum().backward()
    return [result, leaf.grad, *(parameter.grad for parameter in module.parameters())], shared


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
class TestWithKernels:
    pytestmark = with_kernels

    def test_gradients_are_those_of_separate_casts_to_the_bit(self, count):
        module = Projections(count).to(DEVICE)
        expected, _ = run(module, share=False)
        found, shared = run(module)
        assert shared.call_count == (count > 1)
        assert all(map(torch.equal, found, expected))

    def test_a_gradient_that_nobody_asks_for_is_none(self, count):
        x = torch.randn(2, WIDTH, device=DEVICE, requires_grad=True)
        casts = SharedCast.apply(x, torch.bfloat16, count)
        casts[count // 2].float().pow(2).sum().backward()
        assert torch.equal(x.grad, (2 * x.detach().bfloat16().float()).bfloat16().float())


def first_without_grad(module, x):
    with torch.no_grad():
        first = module.part0(x)
    return first * module.part1(x) + module.part2(x)


def first_in_inference_mode(module, x):
    with torch.inference_mode():
        first = float(module.part0(x).sum())
    return first * module.part1(x) + module.part2(x)


def later_a_leaf(module, x):
    x = x.detach()
    first = module.part0(x)
    return first + module.part1(x.requires_grad_()) + module.part2(x)


def later_detached(module, x):
    x = x * 1
    return module.part0(x) + module.part1(x.detach_()) + module.part2(x)


def one_in_another_dtype(module, x):
    first = module.part0(x)
    with torch.autocast(DEVICE, torch.float16):
        second = module.part1(x)
    return first + second.bfloat16() + module.part2(x)


def one_without_autocast(module, x):
    first = module.part0(x)
    with torch.autocast(DEVICE, enabled=False):
        second = module.part1(x)
    return first + second + module.part2(x)


def of_a_leaf(module, x):
    leaf = x.detach().requires_grad_()
    total = module.part0(leaf) + module.part1(leaf) * 3 + module.part2(leaf)
    total.float().pow(2).sum().backward(retain_graph=True)
    return x * leaf.grad


PATTERNS = (
    *(first_without_grad, first_in_inference_mode, later_a_leaf, later_detached),
    *(one_in_another_dtype, one_without_autocast, of_a_leaf),
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
class TestStates:
    pytestmark = with_kernels

    def test_gradients_are_those_of_separate_casts(self, pattern):
        module = Projections(3).to(DEVICE)
        with mock.patch.object(Projections, "forward", pattern):
            expected, _ = run(module, share=False)
            found, _ = run(module, times=3)
        for mine, its in zip(found, expected, strict=True):
            assert (mine is None) == (its is None)
            assert mine is None or torch.allclose(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "lfm2", "qwen2"])
class TestInAModel:
    pytestmark = with_kernels

    def test_each_layer_casts_what_its_projections_share_once(self, kind):
        model = built(kind).to(DEVICE)
        with (
            torch.autocast(DEVICE, torch.bfloat16),
            mock.patch.object(SharedCast, "apply", side_effect=SharedCast.apply) as shared,
        ):
            first = gradients(model, kernels=True)
            in_first = shared.call_count
            found = gradients(model, kernels=True)
        # The layers are computed again in backward, where the first forward has shown who shares what
        assert 0 < in_first < shared.call_count - in_first
        assert torch.equal(found, first)


def test_without_autocast_inputs_are_left_alone():
    module = Projections(3).to(DEVICE)
    expected, _ = run(module, share=False, enabled=False)
    found, shared = run(module, enabled=False)
    assert not shared.called
    assert all(map(torch.equal, found, expected))


def test_inputs_of_the_products_dtype_are_left_alone():
    _, shared = run(
        Projections(3, torch.bfloat16).to(DEVICE), x=torch.ones(3, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    )
    assert not shared.called


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
        compiling(model, is_on=False, kernels=True),
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
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
        assert "forward" in vars(attention.q_proj)
    old = ref(attention.q_proj)
    attention.q_proj = nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
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
        with compiling(model, is_on=False, kernels=True), compiled_forwards(model):
            attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
        with target(), compiling(model, is_on=False, kernels=True), compiled_forwards(model):
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
