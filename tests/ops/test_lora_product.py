"""A linear layer with LoRA's terms within its products, against PEFT's formula in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import relative_error
from trl_fused_grpo.ops import lora_product
from trl_fused_grpo.ops.lm_head import LowRank
from trl_fused_grpo.ops.lora_product import lora_linear


N, H, O = 129, 65, 47  # noqa: E741 - as in the formulas


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def peft_formula(x, weight, bias, terms):
    """`result = result + lora_B(lora_A(x)) * scaling` for each adapter, as PEFT computes it."""
    result = F.linear(x, weight, bias)
    dtype = result.dtype
    for term in terms:
        x_term = F.dropout(x.to(term.a.dtype), term.dropout)
        result = result + F.linear(F.linear(x_term, term.a), term.b) * term.scale
    return result.to(dtype)


def problem(dtype, ranks=(4,), bias=True, adapter_dtype=None, x_dtype=None, shape=(3, 43), device="cpu", size=(H, O)):
    generator = torch.Generator().manual_seed(0)

    def randn(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)

    width, outputs = size
    x = randn(*shape, width, dtype=x_dtype or dtype).requires_grad_()
    weight, bias = randn(outputs, width).div(width**0.5), randn(outputs) if bias else None
    factors = dtype if adapter_dtype is None else adapter_dtype
    terms = []
    for r in ranks:
        a, b = randn(r, width, dtype=factors).div(width**0.5), randn(outputs, r, dtype=factors)
        terms.append(LowRank(a.requires_grad_(), b.requires_grad_(), 0.3 + r / 7))
    return x, weight, bias, terms, randn(*shape, outputs).float()


def outputs(formula, x, weight, bias, terms, grad):
    y = formula(x, weight, bias, terms)
    leaves = [t for t in (x, weight, bias, *(p for term in terms for p in (term.a, term.b))) if t is not None]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(y, leaves, grad.to(y.dtype))
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
    return [y, *grads]


def in_double(x, weight, bias, terms, grad):
    def double(t):
        return None if t is None else t.detach().double().requires_grad_(t.requires_grad)

    exact = [LowRank(double(term.a), double(term.b), term.scale) for term in terms]
    return double(x), double(weight), double(bias), exact, grad.double()


def fused(x, weight, bias, terms, dtype=None):
    return lora_linear(x, weight, bias, terms, dtype or x.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [(4,), (3, 8)], ids=["one", "two"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen-base", "trained-base"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_are_those_of_the_formula(dtype, ranks, trained, bias):
    given = problem(dtype, ranks, bias)
    for tensor in given[1:3]:
        if tensor is not None:
            tensor.requires_grad_(trained)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for value, truth in zip(outputs(fused, *given), outputs(peft_formula, *in_double(*given)), strict=True):
        assert relative_error(value, truth) < tolerance


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_no_error_is_larger_than_that_of_the_formula(dtype, x_dtype, device):
    """Float32 and bfloat16 weights, float32 adapters as PEFT makes them."""
    size = (H, O) if device == "cpu" else (1024, 3072)
    given = problem(dtype, (16, 4), True, torch.float32, x_dtype, (8, 300), device, size)
    truth = outputs(peft_formula, *in_double(*given))
    with torch.autocast(device, dtype=torch.bfloat16):
        mine = outputs(lambda *call: fused(*call, dtype=torch.bfloat16), *given)
        stock = outputs(peft_formula, *given)
    for value, other, exact in zip(mine, stock, truth, strict=True):
        assert value.dtype == other.dtype
        assert relative_error(value, exact) < 1.02 * relative_error(other, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rates", [(0.4, 0.7), (0.0, 0.3), (0.5, 1.0)], ids=str)
def test_dropout_reaches_the_terms_alone_and_draws_as_torch_does(rates, device):
    x, weight, bias, terms, grad = problem(torch.float32, (3, 8), device=device)
    given = x, weight, bias, [replace(term, dropout=p) for term, p in zip(terms, rates, strict=True)], grad
    torch.manual_seed(5)
    mine, drawn = outputs(fused, *given), torch.rand(1, device=device)
    torch.manual_seed(5)
    other, expected_drawn = outputs(peft_formula, *given), torch.rand(1, device=device)
    assert drawn == expected_drawn
    for value, truth in zip(mine, other, strict=True):
        assert relative_error(value, truth) < 2e-6


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_under_autocast_has_no_larger_error_than_the_formula(x_dtype, device):
    """The error of both is that to the formula in float32, which draws the same random numbers."""
    size = (H, O) if device == "cpu" else (1024, 3072)
    x, weight, bias, terms, grad = problem(x_dtype, (16,), True, torch.float32, x_dtype, (8, 300), device, size)
    given = x, weight, bias, [replace(terms[0], dropout=0.3)], grad

    def seeded(formula, *given):
        torch.manual_seed(5)
        return outputs(formula, *given)

    exact = (*(t.detach().float().requires_grad_(t.requires_grad) for t in given[:3]), *given[3:])
    truth = seeded(peft_formula, *exact)
    with torch.autocast(device, dtype=torch.bfloat16):
        mine = seeded(lambda *call: fused(*call, dtype=torch.bfloat16), *given)
        stock = seeded(peft_formula, *given)
    for value, other, expected in zip(mine, stock, truth, strict=True):
        assert relative_error(value, expected) < 1.02 * relative_error(other, expected)


class Casts(TorchDispatchMode):
    """Counts the casts of as many numbers as the rows have features."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket.__name__ == "_to_copy" and result.numel() == N * H
        return result


def test_an_input_is_cast_once_for_all_layers_that_share_it():
    x, weight, _, terms, _ = problem(torch.float32, bias=False)
    with Casts() as casts:
        first, second = (lora_linear(x, weight, None, terms, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second) and casts.count == 1
    with torch.no_grad():
        x.mul_(2)
    assert not torch.equal(lora_linear(x, weight, None, terms, torch.bfloat16), first)


def test_what_needs_no_gradient_gets_none():
    x, weight, bias, terms, grad = problem(torch.float32)
    y = fused(x.detach(), weight, bias, [replace(terms[0], b=terms[0].b.detach())])
    (grad_a,) = torch.autograd.grad(y, [terms[0].a], grad)
    assert torch.isfinite(grad_a).all() and weight.grad is None


def test_no_rows_and_an_output_that_is_changed_in_place():
    x, weight, bias, terms, _ = problem(torch.float32, shape=(0,))
    fused(x, weight, bias, terms).sum().backward()
    assert terms[0].a.grad.abs().sum() == 0
    x, weight, bias, terms, grad = problem(torch.float32)
    y = fused(x, weight, bias, terms)
    y.mul_(2).backward(grad)
    expected = torch.autograd.grad(peft_formula(x, weight, bias, terms) * 2, x, grad)
    assert relative_error(x.grad, *expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_of_zeros_changes_no_bit(dtype, bias, device):
    """The policy is then equal to its reference, whose adapters are off."""
    size = (H, O) if device == "cpu" else (1024, 3072)
    x, weight, bias, (term,), _ = problem(dtype, bias=bias, shape=(2, 300), device=device, size=size)
    y = fused(x, weight, bias, [replace(term, b=torch.zeros_like(term.b))])
    assert torch.equal(y, F.linear(x, weight, bias))


def test_one_copy_of_an_input_is_kept_at_a_time():
    first, second = torch.randn(4, H), torch.randn(4, H)
    copy = lora_product.cast_once(first, torch.bfloat16)
    assert lora_product.cast_once(first, torch.bfloat16) is copy
    assert lora_product.cast_once(second, torch.bfloat16) is not copy
    assert first._lora_copy is None and second._lora_copy is not None
    assert lora_product.cast_once(second, torch.float32).data_ptr() == second.data_ptr()


@pytest.mark.parametrize("is_alone", [True, False], ids=["trained-alone", "frozen-alone"])
@pytest.mark.parametrize("one", range(7), ids=["x", "weight", "bias", "a", "b", "second-a", "second-b"])
@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 0.3), (0.3, 0.0)], ids=str)
def test_any_part_may_be_frozen(rates, one, is_alone):
    x, weight, bias, terms, grad = problem(torch.float64, (3, 8))
    for i, leaf in enumerate((x, weight, bias, *(factor for term in terms for factor in (term.a, term.b)))):
        leaf.requires_grad_((i == one) == is_alone)
    given = x, weight, bias, [replace(term, dropout=p) for term, p in zip(terms, rates, strict=True)], grad
    torch.manual_seed(5)
    mine = outputs(fused, *given)
    torch.manual_seed(5)
    for value, truth in zip(mine, outputs(peft_formula, *given), strict=True):
        assert relative_error(value, truth) < 1e-12


def test_the_gradient_of_a_bias_in_float32_is_not_rounded_to_that_of_the_product():
    x, bias = torch.ones(257, H), torch.zeros(O, requires_grad=True)
    terms = [LowRank(torch.ones(2, H), torch.ones(O, 2), 1.0)]
    y = lora_linear(x, torch.ones(O, H), bias, terms, torch.bfloat16)
    (grad,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert grad.tolist() == [257.0] * O  # bfloat16 has 256 and 258
