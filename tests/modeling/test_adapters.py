"""PEFT's LoRA layers with their products together: as PEFT's own, where they may be, and undone."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from tests.layout_pairs import SHAPE, assert_trains_as_stock, from_config, log_probs, make_pair, short_rows
from tests.oracle import relative_error
from trl_fused_grpo.modeling import adapters
from trl_fused_grpo.modeling.adapters import fused_adapters, uninstall_adapters


peft = pytest.importorskip("peft")
ALL = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
KINDS = {
    "all-linear": {},
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "dropout": {"lora_dropout": 0.3},
}


@pytest.fixture
def fused_calls(monkeypatch):
    """How many layers have their products together."""
    calls = []

    def count(*args):
        calls.append(args)
        return lora_linear(*args)

    lora_linear = adapters.lora_linear
    monkeypatch.setattr(adapters, "lora_linear", count)
    return calls


def checkpoint(trainer):
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.enable_input_require_grads()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient-checkpointing"])
def test_adapters_train_as_stock(tmp_path, fused_calls, kind, checkpointing):
    options = {"fused_layout": "padded"} if kind == "dropout" else {}  # packed rows draw other random numbers
    make_config = lambda: peft.LoraConfig(**{**ALL, **KINDS[kind]})  # noqa: E731
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), peft_config=make_config, **options)
    if checkpointing:
        checkpoint(fused), checkpoint(stock)
    inputs = short_rows()
    drawn, expected_drawn = assert_trains_as_stock(fused, stock, inputs)
    assert kind != "dropout" or drawn == expected_drawn
    assert bool(fused_calls) == (kind not in ("dora", "bias"))
    fused.detach()
    left = [vars(module)["forward"] for module in fused.model.modules() if "forward" in vars(module)]
    assert not [forward for forward in left if hasattr(forward, "_override")]


def test_the_option_leaves_adapters_to_peft(tmp_path, fused_calls):
    make_config = lambda: peft.LoraConfig(**ALL)  # noqa: E731
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), peft_config=make_config, fused_lora=False)
    assert_trains_as_stock(fused, stock, short_rows())
    assert not fused_calls


def two_adapters(trainer, state):
    model = trainer.model
    if state == "both":
        model.base_model.set_adapter(["default", "second"])
    elif state == "merged":
        model.merge_adapter()
    else:
        model.set_adapter("second")


@pytest.mark.parametrize("state", ["both", "second", "merged"])
def test_the_adapters_in_force_are_those_that_count(tmp_path, state):
    make_config = lambda: peft.LoraConfig(**ALL)  # noqa: E731
    fused, stock = make_pair(tmp_path, from_config(LlamaConfig(**SHAPE)), peft_config=make_config)
    inputs = short_rows()
    for trainer in (fused, stock):
        torch.manual_seed(7)
        trainer.model.add_adapter("second", peft.LoraConfig(**{**ALL, "r": 2}))
        two_adapters(trainer, state)
    expected = log_probs(stock, inputs)
    assert relative_error(log_probs(fused, inputs), expected) < 1e-5
    if state != "merged":
        assert_trains_as_stock(fused, stock, inputs)
    with fused.model.disable_adapter(), stock.model.disable_adapter():
        reference = log_probs(stock, inputs)
        assert relative_error(log_probs(fused, inputs), reference) < 1e-5
    assert relative_error(reference, expected) > 1e-3


def adapted(**options):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.first, model.second = nn.Linear(12, 8), nn.Linear(8, 6)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["first", "second"], "init_lora_weights": False, **options})
    return peft.get_peft_model(model, config)


def run(model, x, **kwargs):
    with fused_adapters(model.modules()):
        return model(x, **kwargs)


CHANGES = {
    "a hook on the layer that carries it": lambda layer: layer.base_layer.register_forward_hook(lambda *_: None),
    "a hook on a factor": lambda layer: layer.lora_A["default"].register_full_backward_hook(lambda *_: None),
    "a forward of the other factor": lambda layer: setattr(
        layer.lora_B["default"], "forward", lambda h: nn.functional.linear(h, layer.lora_B["default"].weight)
    ),
    "another class": lambda layer: setattr(layer, "base_layer", type("Own", (nn.Linear,), {})(12, 8)),
    "gathered for its own module": lambda layer: setattr(layer.lora_A["default"].weight, "ds_id", 1),
    "a factor in another dtype": lambda layer: layer.lora_A["default"].double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_were_changed_are_left_to_peft_and_the_reason_is_logged(change, fused_calls, caplog):
    model, x = adapted(), torch.randn(3, 12)
    CHANGES[change](model.base_model.model.first)
    if change == "a factor in another dtype":
        model.base_model.model.first.lora_B["default"].double()
    expected = model(x)
    assert torch.equal(model.base_model.model.first(x), model.base_model.model.first(x))
    assert relative_error(run(model, x), expected) < 1e-6
    assert len(fused_calls) == 1  # the other layer
    assert "PEFT computes the adapters of some layers by itself, because" in caplog.text


def test_rows_with_adapters_of_their_own_are_left_to_peft(fused_calls):
    model, x = adapted().eval(), torch.randn(3, 12)
    names = ["default", "__base__", "default"]
    expected = model(x, adapter_names=names)
    assert torch.equal(run(model, x, adapter_names=names), expected) and not fused_calls


def test_calls_without_gradient_of_others_are_peft_s(fused_calls):
    model, x = adapted(), torch.randn(3, 12)
    run(model, x)
    assert len(fused_calls) == 2
    with torch.no_grad():
        model(x)
    assert len(fused_calls) == 2
    model(x)
    assert len(fused_calls) == 4


def test_copies_files_and_merging_are_as_before():
    model, x = adapted(), torch.randn(3, 12)
    names, expected = list(model.state_dict()), model(x)
    run(model, x)
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter in other.parameters():
            parameter.data.mul_(0.5)
        assert relative_error(other(x), expected) > 0.1
    assert relative_error(model(x), expected) < 1e-6
    assert relative_error(model.merge_and_unload()(x), expected) < 1e-5
    uninstall_adapters(model.modules())


def test_without_adapters_an_input_is_cast_once_for_the_layers_that_share_it():
    model, x = adapted(), torch.randn(3, 12)
    with model.disable_adapter(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        assert torch.equal(run(model, x), expected) and x._lora_copy[1].dtype == torch.bfloat16


class Seen(TorchDispatchMode):
    """Counts the operations that write a number for each feature of each token, but for products."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        free = ("mm", "addmm", "addmm_", "empty", "view", "_unsafe_view", "detach", "t")
        self.count += isinstance(result, torch.Tensor) and result.numel() >= self.size and name not in free
        return result


@pytest.mark.parametrize(
    ("dtype", "count"),
    # On CUDA the gradient of a float32 input is written in float32 by the product: 1, 0
    [(torch.float32, (1, 1)), (torch.bfloat16, (0, 0))],
    ids=["float32-input", "bfloat16-input"],
)
def test_no_operation_over_all_features_is_left_but_the_cast_of_a_float32_input(dtype, count):
    """PEFT has 4 in forward and 4 in backward: two casts or a cast and its reverse, a scale, a sum."""
    model = adapted(target_modules=["first"])
    layer = model.base_model.model.first
    x = (torch.randn(512, 12, dtype=dtype).requires_grad_() * 1).to(dtype)
    run(model, torch.randn(3, 12))
    for fused in (True, False):
        if not fused:
            uninstall_adapters(model.modules())
        with torch.autocast("cpu", dtype=torch.bfloat16), Seen(512 * 8) as forward:
            y = layer(x)
        grad = torch.randn_like(y)
        with Seen(512 * 8) as backward:
            torch.autograd.grad(y, x, grad)
        assert (forward.count, backward.count) == (count if fused else (4, 4))
