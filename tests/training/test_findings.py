"""What of the user's code, once replaced or hooked, gives which level of the ladder; what libraries do gives none."""

import functools
import inspect
import sys
import textwrap
import types
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import nn
from torch.ao import quantization
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EarlyStoppingCallback, GenerationMixin, TrainerCallback
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_callback import CallbackHandler
from trl import GRPOTrainer

from tests.code_of import as_code_of
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer, reward_length
from trl_fused_grpo import FusedGRPOTrainer, FusedRLOOConfig, FusedRLOOTrainer
from trl_fused_grpo._compat import tried_architectures
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import is_library_function
from trl_fused_grpo._compat.restated import source_digest
from trl_fused_grpo._compat.torch import modules_of, parameters_of
from trl_fused_grpo._compat.trainers import STEP_METHODS
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training.findings import Findings, Level, Reason, replaced_objective
from trl_fused_grpo.training.plan import why_forwards_are_not_shared

from .sampler import use_sampler


STOCK, HEAD, ROWS, WINDOW = Level.STOCK, Level.HEAD, Level.ROWS, Level.WINDOW
# TRL < 1.14 computes log-probs of padding, which a replaced method may read
METHOD = HEAD if trl_compat.COMPUTES_LOGPS_OF_PADDING else ROWS
# TRL >= 1.15 calls backbone and head, whatever the forward of the model and its head do
OUTER = STOCK if trl_compat.LOGPS_FROM_LOGITS else HEAD


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path)


@pytest.fixture
def stack():
    """What is to be undone after a test."""
    with ExitStack() as stack:
        yield stack


def users_function(self, *args, **kwargs):
    return None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (GRPOTrainer._compute_loss, True),
        (GRPOTrainer._prepare_inputs, True),  # wrapped by TRL's profiler
        (torch.no_grad()(GRPOTrainer._compute_loss), True),
        (users_function, False),
        (torch.no_grad()(users_function), False),
        (functools.wraps(GRPOTrainer._compute_loss)(lambda *args: None), False),
        (functools.partial(users_function), False),
        (functools.partial(GRPOTrainer._compute_loss), True),
        (types.MethodType(users_function, object()), False),
        (functools.lru_cache(GRPOTrainer._compute_loss), True),
        (functools.lru_cache(users_function), False),
        (as_code_of("transformers.trainer", users_function), True),
        (functools.update_wrapper(functools.partial(GRPOTrainer._compute_loss), users_function), False),
    ],
    ids=[
        *("trl", "trl-profiled", "trl-decorated", "users", "users-decorated", "users-wrapper", "users-partial"),
        *("trl-partial", "users-method", "trl-cached", "users-cached", "as-library", "library-around-users"),
    ],
)
def test_a_function_counts_as_a_librarys_when_all_that_it_wraps_does(function, expected):
    assert is_library_function(function) is expected


# Methods of the trainer


def reasons_of(trainer):
    findings = trainer._fused.look()
    return findings.level, " | ".join(reason.text for reason in findings.reasons)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", sorted({*STEP_METHODS, *trl_compat.OBJECTIVE_METHODS, "train"}))
def test_a_replaced_step_method_is_found_in_a_subclass_on_the_instance_and_in_trls_class(trainer, monkeypatch, name):
    assert trainer._fused.look() == Findings()
    monkeypatch.setattr(trainer, "__class__", type("Mine", (FusedGRPOTrainer,), {name: users_function}))
    assert reasons_of(trainer) == (METHOD, f"Mine.{name} may see micro-batches")
    monkeypatch.undo()
    monkeypatch.setitem(vars(trainer), name, users_function)
    assert reasons_of(trainer) == (METHOD, f"the instance's {name} may see micro-batches")
    monkeypatch.undo()
    if hasattr(GRPOTrainer, name):
        monkeypatch.setattr(GRPOTrainer, name, users_function)
        level, text = reasons_of(trainer)
        assert level == (STOCK if name == "_get_per_token_logps_and_entropies" else METHOD)
        assert f"GRPOTrainer.{name}" in text
    monkeypatch.undo()
    assert trainer._fused.look() == Findings()


@pytest.mark.parametrize("name", ["_get_per_token_logps_and_entropies", "_compute_loss", "training_step"])
def test_a_method_of_a_class_behind_the_fused_one_is_found(tmp_path, name):
    behind = type("Behind", (GRPOTrainer,), {name: users_function})
    level, text = reasons_of(make_trainer(tmp_path, type("Mine", (FusedGRPOTrainer, behind), {})))
    assert level == (STOCK if "logps" in name else METHOD)
    assert f"Behind.{name}" in text


def test_the_objective_counts_as_replaced_with_any_method_that_trls_loss_calls(trainer, monkeypatch):
    assert "get_off_policy_mask" in trl_compat.OBJECTIVE_METHODS
    for name in ("_compute_loss", *trl_compat.OBJECTIVE_METHODS):
        monkeypatch.setattr(GRPOTrainer, name, users_function)
        assert replaced_objective(trainer) == f"GRPOTrainer.{name}"
        monkeypatch.undo()


def edited(method, folder):
    """A method of TRL's out of a file in which it has one more statement, beside the other names of TRL's file."""
    function = inspect.unwrap(method)
    head, body = textwrap.dedent(inspect.getsource(function)).split(":\n", 1)
    indent = body[: len(body) - len(body.lstrip())]
    file = folder / f"{function.__name__}.py"
    file.write_text(f"{head}:\n{indent}edited = True\n{body}")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), vars(sys.modules[function.__module__]), names)
    return names[function.__name__]


@pytest.mark.parametrize("name", ["_compute_loss", "_generate_and_score_completions", "get_off_policy_mask"])
def test_a_loss_of_trls_whose_source_is_not_known_shares_nothing(trainer, monkeypatch, stack, tmp_path, name):
    source_digest.cache_clear()  # who edits a file does so before it is imported
    stack.callback(source_digest.cache_clear)
    own = inspect.getattr_static(GRPOTrainer, name)
    method = edited(getattr(own, "__func__", own), tmp_path)
    monkeypatch.setattr(GRPOTrainer, name, staticmethod(method) if isinstance(own, staticmethod) else method)
    assert replaced_objective(trainer) is None
    level, text = reasons_of(trainer)
    assert level == ROWS
    assert "the loss of GRPOTrainer in TRL" in text and "none of those that were tested" in text


# Everything else that is replaced, once each


class OwnModule(nn.Module):
    def forward(self, hidden):
        return hidden


class OwnObject:
    pass


class OwnTensor(torch.Tensor):
    pass


class OwnHook(ModelHook):
    pass


class OwnFunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class OwnDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class OwnWrapper(nn.DataParallel):
    pass


class Substep(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


class OwnHandler(CallbackHandler):
    def call_event(self, event, args, state, control, **kwargs):
        return super().call_event(event, args, state, control, **kwargs)


class OwnSGD(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def own_class(module, **members):
    """A module becomes one of a subclass of the user's."""
    cls = type(module)
    module.__class__ = type(f"Own{cls.__name__}", (cls,), members)


def calling(function):
    """A function of the user's that calls another."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def see(*args):
    """A hook that changes nothing."""


def model_of(trainer):
    return trainer.model


def head_of(trainer):
    return trainer.model.lm_head


def layer_of(trainer):
    return trainer.model.model.layers[0]


def mlp_of(trainer):
    return layer_of(trainer).mlp


def file_of(trainer):
    return sys.modules[type(trainer.model).__module__]


def is_replaced(place, name):
    """`name` of what `place` finds becomes a function of the user's that calls the one before."""
    return lambda trainer, patch, stack: patch.setattr(place(trainer), name, calling(getattr(place(trainer), name)))


def is_replaced_in_class(place, name):
    return is_replaced(lambda trainer: type(place(trainer)), name)


def is_called(place, name, *args):
    """A method of what `place` finds is called."""
    return lambda trainer, patch, stack: getattr(place(trainer), name)(*args)


def own_property(name):
    def change(trainer, patch, stack):
        patch.setattr(trainer, "__class__", type("Mine", (FusedGRPOTrainer,), {name: property(lambda self: 1.0)}))

    return change


def own_getattribute(trainer, patch, stack):
    members = {"__getattribute__": lambda self, name: object.__getattribute__(self, name)}
    patch.setattr(trainer, "__class__", type("Mine", (FusedGRPOTrainer,), members))


def own_handler(trainer, patch, stack):
    trainer.callback_handler.__class__ = OwnHandler


def own_accelerator(trainer, patch, stack):
    own_class(trainer.accelerator)


def own_optimizer(trainer, patch, stack):
    trainer.optimizer = OwnSGD(trainer.model.parameters(), lr=0.1)


def own_step(trainer, patch, stack):
    trainer.create_optimizer()
    trainer.optimizer.step = calling(trainer.optimizer.step)


def own_step_prepared(trainer, patch, stack):
    own_step(trainer, patch, stack)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)


def optimizer_in_backward(trainer, patch, stack):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, [trainer.model.lm_head.weight], {"lr": 0.1})


def multi_grad_hook(trainer, patch, stack):
    register_multi_grad_hook([trainer.model.lm_head.weight, layer_of(trainer).mlp.up_proj.weight], see)


def multi_grad_hook_of_any(trainer, patch, stack):
    register_multi_grad_hook([trainer.model.lm_head.weight], see, mode="any")


def parameter_hook(trainer, patch, stack):
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient)


def accumulate_hook(trainer, patch, stack):
    trainer.model.lm_head.weight.register_post_accumulate_grad_hook(see)


def global_hook(register):
    def change(trainer, patch, stack):
        stack.callback(getattr(nn.modules.module, register)(see).remove)

    return change


def attention_in_table(table, name):
    def change(trainer, patch, stack):
        patch.setitem(table._global_mapping, name, calling(table[name]))

    return change


def own_attribute(trainer, patch, stack):
    del mlp_of(trainer).act_fn
    mlp_of(trainer).act_fn = lambda hidden: F.silu(hidden)


def own_object(trainer, patch, stack):
    mlp_of(trainer).notes = OwnObject()


def class_of(place, **members):
    return lambda trainer, patch, stack: own_class(place(trainer), **members)


def has_part(place, make):
    """What `place` finds gets one more module, whether it is called or not."""
    return lambda trainer, patch, stack: place(trainer).add_module("part", make())


def accelerate_hook(place):
    return lambda trainer, patch, stack: add_hook_to_module(place(trainer), OwnHook())


def parametrized(place):
    def change(trainer, patch, stack):
        parametrize.register_parametrization(place(trainer), "weight", OwnModule())

    return change


def tensor_subclass(place):
    def change(trainer, patch, stack):
        place(trainer).weight = nn.Parameter(place(trainer).weight.detach().as_subclass(OwnTensor))

    return change


def mode_is_on(mode):
    return lambda trainer, patch, stack: stack.enter_context(mode())


def in_own_wrapper(trainer, patch, stack):
    trainer.model_wrapped = OwnWrapper(trainer.model)


def with_option(name, value):
    return lambda trainer, patch, stack: setattr(trainer.model.get_input_embeddings(), name, value)


def not_tried(trainer, patch, stack):
    patch.setattr(tried_architectures, "TRIED", tried_architectures.TRIED - {"LlamaForCausalLM"})


def fake_quantized():
    return quantization.FakeQuantize.with_args(observer=quantization.MovingAverageMinMaxObserver)()


def up_proj_of(trainer):
    return mlp_of(trainer).up_proj


def torch_file(trainer):
    return torch


def functional(trainer):
    return F


def tensor_class(trainer):
    return torch.Tensor


CHANGES = {
    # what may see micro-batches, gradients, or the moment when weights move
    "temperature computed": (own_property("temperature"), METHOD, "Mine.temperature"),
    "args computed": (own_property("args"), METHOD, "Mine.args"),
    "getattribute": (own_getattribute, METHOD, "Mine.__getattribute__"),
    "substep callback": (is_called(lambda t: t, "add_callback", Substep), ROWS, "Substep.on_substep_end"),
    "callbacks' class": (
        lambda trainer, patch, stack: patch.setattr(TrainerCallback, "on_substep_end", users_function),
        *(ROWS, ".on_substep_end"),
    ),
    "callback handler": (own_handler, ROWS, "OwnHandler.call_event"),
    "accelerator's backward": (is_replaced(lambda t: t.accelerator, "backward"), ROWS, "Accelerator.backward"),
    "accelerators' backward": (is_replaced_in_class(lambda t: t.accelerator, "backward"), ROWS, "Accelerator.backward"),
    "accelerator's class": (own_accelerator, ROWS, "OwnAccelerator"),
    "optimizer's class": (own_optimizer, ROWS, "OwnSGD"),
    "optimizer's step": (own_step, ROWS, "AdamW.step"),
    "optimizer's step, prepared": (own_step_prepared, ROWS, "AdamW.step"),
    "optimizer in backward": (optimizer_in_backward, ROWS, "the gradient of lm_head.weight"),
    "gradient hook": (parameter_hook, ROWS, "the gradient of lm_head.weight"),
    "accumulation hook": (accumulate_hook, ROWS, "the gradient of lm_head.weight"),
    "hook on all gradients": (multi_grad_hook, ROWS, "the gradient of model.layers.0.mlp.up_proj.weight"),
    "hook on any gradient": (multi_grad_hook_of_any, ROWS, "the gradient of lm_head.weight"),
    # hooks
    "hook on the model": (is_called(model_of, "register_forward_hook", see), STOCK, "a hook on LlamaForCausalLM"),
    "pre-hook on the model": (is_called(model_of, "register_forward_pre_hook", see), STOCK, "a hook on LlamaForC"),
    "backward hook on the model": (
        is_called(model_of, "register_full_backward_hook", see),
        *(STOCK, "a hook on LlamaForCausalLM"),
    ),
    "hook on the head": (is_called(head_of, "register_forward_hook", see), STOCK, "a hook on Linear"),
    "pre-hook on the head": (is_called(head_of, "register_forward_pre_hook", see), STOCK, "a hook on Linear"),
    "backward hook on the head": (is_called(head_of, "register_full_backward_hook", see), STOCK, "a hook on Linear"),
    "hook on a layer": (is_called(layer_of, "register_forward_hook", see), HEAD, "a hook on LlamaDecoderLayer"),
    "pre-hook on a layer": (is_called(layer_of, "register_forward_pre_hook", see), HEAD, "a hook on LlamaDecoderLayer"),
    "backward hook on a layer": (
        is_called(layer_of, "register_full_backward_hook", see),
        *(HEAD, "a hook on LlamaDecoderLayer"),
    ),
    "backward pre-hook on a layer": (
        is_called(layer_of, "register_full_backward_pre_hook", see),
        *(HEAD, "a hook on LlamaDecoderLayer"),
    ),
    "accelerate's hook of the user's": (accelerate_hook(mlp_of), HEAD, "_hf_hook of LlamaMLP"),
    "the same on the head": (accelerate_hook(head_of), STOCK, "_hf_hook of Linear"),
    "the same on the model": (accelerate_hook(model_of), STOCK, "_hf_hook of LlamaForCausalLM"),
    "hook on every module": (global_hook("register_module_forward_hook"), STOCK, "a hook on every module"),
    "pre-hook on every module": (global_hook("register_module_forward_pre_hook"), STOCK, "a hook on every module"),
    "backward hook on every module": (
        global_hook("register_module_full_backward_hook"),
        *(STOCK, "a hook on every module"),
    ),
    "backward pre-hook on every module": (
        global_hook("register_module_full_backward_pre_hook"),
        *(STOCK, "a hook on every module"),
    ),
    # replaced methods and functions
    "forward of the model": (is_replaced(model_of, "forward"), STOCK, "the forward of LlamaForCausalLM"),
    "forward of the head": (is_replaced(head_of, "forward"), STOCK, "the forward of Linear"),
    "forward of a layer": (is_replaced(layer_of, "forward"), HEAD, "the forward of LlamaDecoderLayer"),
    "forward of a class": (is_replaced_in_class(layer_of, "forward"), HEAD, "LlamaDecoderLayer.forward"),
    "forward of the heads' class": (is_replaced_in_class(head_of, "forward"), STOCK, "Linear"),
    "method of a class": (is_replaced_in_class(mlp_of, "extra_repr"), HEAD, "LlamaMLP.extra_repr"),
    "method of a module": (is_replaced(mlp_of, "extra_repr"), HEAD, "extra_repr of LlamaMLP"),
    "call of every module": (
        lambda trainer, patch, stack: patch.setattr(nn.Module, "__call__", calling(nn.Module.__call__)),
        *(STOCK, "Module.__call__"),
    ),
    "rotary function": (is_replaced(file_of, "apply_rotary_pos_emb"), HEAD, "apply_rotary_pos_emb of transformers"),
    "mask function": (is_replaced(file_of, "create_causal_mask"), HEAD, "create_causal_mask of transformers"),
    "silu": (is_replaced(functional, "silu"), HEAD, "silu of torch.nn.functional"),
    "sdpa": (is_replaced(functional, "scaled_dot_product_attention"), HEAD, "scaled_dot_product_attention"),
    "linear": (is_replaced(functional, "linear"), OUTER, "linear"),
    "what TRL's log-probs call": (is_replaced(torch_file, "gather"), OUTER, "gather of torch"),
    "rsqrt of torch": (is_replaced(torch_file, "rsqrt"), HEAD, "rsqrt of torch"),
    "tensor method": (is_replaced(tensor_class, "transpose"), HEAD, "torch.Tensor.transpose"),
    "attention in the table": (
        attention_in_table(ALL_ATTENTION_FUNCTIONS, "sdpa"),
        *(HEAD, "the attention function registered as 'sdpa'"),
    ),
    "mask in the table": (
        attention_in_table(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa"),
        *(HEAD, "the mask function registered as 'sdpa'"),
    ),
    "function as an attribute": (own_attribute, HEAD, "act_fn of LlamaMLP"),
    "object as an attribute": (own_object, HEAD, "notes of LlamaMLP"),
    # classes
    "module": (has_part(layer_of, OwnModule), HEAD, "OwnModule"),
    "subclass with another helper": (class_of(mlp_of, extra_repr=users_function), HEAD, "OwnLlamaMLP"),
    "subclass without anything": (class_of(mlp_of), HEAD, "OwnLlamaMLP"),
    "class of the model": (class_of(model_of), OUTER, "OwnLlamaForCausalLM"),
    "class of the head": (class_of(head_of, __call__=users_function), STOCK, "OwnLinear"),
    "wrapper": (in_own_wrapper, STOCK, "OwnWrapper"),
    "parametrization": (parametrized(up_proj_of), HEAD, "OwnModule"),
    "parametrized head": (parametrized(head_of), STOCK, "OwnModule"),
    "tensor of a layer": (tensor_subclass(up_proj_of), HEAD, "OwnTensor"),
    "mode of functions": (mode_is_on(OwnFunctionMode), STOCK, "OwnFunctionMode"),
    "mode of operations": (mode_is_on(OwnDispatchMode), STOCK, "OwnDispatchMode"),
    # of torch's, but other in other rows, or in another number of forwards
    "batch norm": (has_part(layer_of, lambda: nn.BatchNorm1d(4)), HEAD, "BatchNorm1d"),
    "instance norm": (has_part(layer_of, lambda: nn.InstanceNorm1d(4)), HEAD, "InstanceNorm1d"),
    "fake quantization": (has_part(layer_of, fake_quantized), HEAD, "which changes its buffers"),
    "spectral norm": (
        lambda trainer, patch, stack: parametrizations.spectral_norm(mlp_of(trainer).up_proj),
        *(HEAD, "_SpectralNorm"),
    ),
    "spectral norm, a hook": (
        lambda trainer, patch, stack: spectral_norm(mlp_of(trainer).up_proj),
        *(HEAD, "a hook on Linear"),
    ),
    "group norm": (has_part(layer_of, lambda: nn.GroupNorm(1, 4)), HEAD, "GroupNorm"),
    "recurrent layer": (has_part(layer_of, lambda: nn.GRU(4, 4)), HEAD, "GRU"),
    "embedding max_norm": (with_option("max_norm", 1.0), HEAD, "Embedding"),
    "embedding scale_grad_by_freq": (with_option("scale_grad_by_freq", True), HEAD, "Embedding"),
    "architecture": (not_tried, HEAD, "LlamaForCausalLM was not tried"),
}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_once_gives_the_level_and_its_reason(trainer, monkeypatch, stack, name):
    change, level, text = CHANGES[name]
    assert trainer._fused.look() == Findings()
    change(trainer, monkeypatch, stack)
    findings = trainer._fused.look()
    stack.close()
    assert findings.level == level, findings
    assert any(reason.level == level and text in reason.text for reason in findings.reasons), findings


REFERENCE_CHANGES = {
    "hook on a layer": (lambda model: model.model.layers[1].register_forward_hook(see), HEAD),
    "hook on the model": (lambda model: model.register_forward_hook(see), STOCK),
    "module": (lambda model: model.model.layers[0].add_module("part", OwnModule()), HEAD),
}


@pytest.mark.parametrize("name", REFERENCE_CHANGES)
def test_what_is_replaced_in_the_reference_counts_as_in_the_policy(tmp_path, name):
    change, level = REFERENCE_CHANGES[name]
    trainer = make_trainer(tmp_path, beta=0.1)
    assert trainer._fused.look() == Findings()
    change(trainer.ref_model)
    assert trainer._fused.look().level == level


def test_the_lowest_level_of_all_reasons_counts(trainer):
    trainer.add_callback(Substep)
    assert trainer._fused.look().level == ROWS
    layer_of(trainer).register_forward_hook(see)
    findings = trainer._fused.look()
    assert findings.level == HEAD
    assert "a hook on LlamaDecoderLayer" in findings.why_below(WINDOW)
    assert findings.why_below(ROWS) == findings.why_below(WINDOW)
    assert findings.why_below(HEAD) is None


def test_a_level_that_a_training_fell_to_stays(trainer):
    trainer._fused.ladder.fall(Reason(HEAD, "rows were refused"))
    assert trainer._fused.ladder.level == HEAD
    assert trainer._fused.look().level == HEAD


# What libraries do


def lora(**options):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})


def with_librarys_hooks(trainer, stack):
    trainer.model.enable_input_require_grads()
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    add_hook_to_module(layer_of(trainer), AlignDevicesHook(io_same_device=True))


def with_ligers_layers(trainer, stack):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    file = vars(file_of(trainer))  # it replaces names there too
    stack.callback(file.update, dict(file))
    _apply_liger_kernel_to_instance(trainer.model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert any("liger" in type(part).forward.__module__ + part.forward.__module__ for part in trainer.model.modules())


def with_librarys_callbacks(trainer, stack):
    trainer.add_callback(EarlyStoppingCallback)
    trainer.create_optimizer_and_scheduler(4)
    trainer.optimizer, trainer.lr_scheduler = trainer.accelerator.prepare(trainer.optimizer, trainer.lr_scheduler)


def with_own_configuration(trainer, stack):
    own_class(trainer.model.config)


def with_own_generation(trainer, stack):
    generate = trainer.model.generate
    trainer.model.generate = calling(generate)
    stack.enter_context(mock.patch.object(GenerationMixin, "generate", calling(GenerationMixin.generate)))


def prepared(trainer, stack):
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)


NO_REASON = {
    "the user's configuration, which is data": ({}, with_own_configuration),
    "the user's generation, which is no forward for log-probs": ({}, with_own_generation),
    "plain": ({}, None),
    "LoRA": ({"peft_config": lora}, None),
    "LoRA on the head": ({"peft_config": lambda: lora(target_modules=["q_proj", "lm_head"])}, None),
    "DoRA with dropout": ({"peft_config": lambda: lora(use_dora=True, lora_dropout=0.1)}, None),
    "reference model": ({"beta": 0.1}, None),
    "accelerate's and transformers' hooks": ({}, with_librarys_hooks),
    "Liger's layers": ({}, with_ligers_layers),
    "callbacks, optimizer, scheduler": ({}, with_librarys_callbacks),
    "mixed precision": ({"bf16": True}, prepared),
    "RLOO": ({"cls": FusedRLOOTrainer, "config": FusedRLOOConfig}, None),
    "another architecture": ({"kind": "gemma3"}, None),
    "a mixture of experts": ({"kind": "moe"}, None),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", NO_REASON)
def test_what_libraries_do_and_what_no_training_step_runs_gives_no_reason(tmp_path, stack, name):
    options, change = NO_REASON[name]
    options = {key: value() if key == "peft_config" else value for key, value in options.items()}
    trainer = make_trainer(tmp_path, **options)
    if change is not None:
        change(trainer, stack)
    assert trainer._fused.look() == Findings()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"peft_config": lora, "beta": 0.1, "gradient_checkpointing": True},
        {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        {"bf16": True, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1},
    ],
    ids=["plain", "lora-reference-checkpointing", "iterations-evaluation", "bf16-scheduler"],
)
def test_a_training_of_libraries_code_stays_at_the_highest_level(tmp_path, caplog, options):
    options = {key: value() if key == "peft_config" else value for key, value in options.items()}
    trainer = make_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2, **options)
    trainer.train()
    assert trainer._fused.look() == Findings()
    assert not [record.message for record in caplog.records if record.message.startswith("Level ")]


# The user's word


def test_unknown_code_in_a_layout_that_was_asked_for_shares_nothing_and_is_told(tmp_path, caplog):
    model = tiny_model("llama")
    model.model.layers[0].add_module("part", OwnModule())
    trainer = make_trainer(tmp_path, model=model, fused_layout="packed", gradient_accumulation_steps=2, max_steps=1)
    (reason,) = trainer._fused.ladder.findings.reasons
    assert reason.level == ROWS
    assert trainer.fused_layout() == "packed"
    assert "OwnModule" in why_forwards_are_not_shared(trainer, trainer._fused.ladder.findings, True)
    trainer.train()
    # The summary tells it too
    told = [record.message for record in caplog.records if record.message.startswith("Level ")]
    assert len(told) == 1 and told[0].startswith("Level rows (") and "may be packed" in told[0]
    assert ",," not in told[0] and ",." not in told[0]


@pytest.mark.parametrize("layout", [None, "padded"])
def test_unknown_code_in_any_other_layout_keeps_trls_rows(tmp_path, layout):
    model = tiny_model("llama")
    model.model.layers[0].add_module("part", OwnModule())
    trainer = make_trainer(tmp_path, model=model, fused_layout=layout)
    assert trainer._fused.ladder.level == HEAD
    assert trainer.fused_layout() == "padded"


# In a training


class WithPenalty(FusedGRPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) + 0.0


def test_the_log_says_each_reason_once_with_what_is_done(tmp_path, caplog):
    trainer = make_trainer(tmp_path, WithPenalty, max_steps=2, gradient_accumulation_steps=2)
    layer_of(trainer).register_forward_hook(see)
    trainer.train()
    told = [record.message for record in caplog.records if record.message.startswith("Level ")]
    assert len(told) == 2
    assert told[0].startswith(f"Level {METHOD.name.lower()} (") and "WithPenalty.compute_loss" in told[0]
    assert told[1].startswith("Level head (rows keep TRL's padding") and "hook on LlamaDecoderLayer" in told[1]


class Rows:
    """A hook that sees the shapes of rows in forwards with gradient."""

    def __init__(self):
        self.shapes = []

    def __call__(self, module, args, output):
        if torch.is_grad_enabled():
            self.shapes.append(tuple((args[0] if args else output).shape))


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"steps_per_generation": 4}], ids=["", "kl", "old-log-probs"])
def test_a_hook_of_a_reward_function_gets_trls_rows_of_the_micro_batches_at_hand(tmp_path, options):
    seen, results = [], []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        hook, generations, holder = Rows(), [], []

        def hooks(completion_ids, hook=hook, generations=generations, holder=holder, **kwargs):
            generations.append(len(completion_ids))
            if len(generations) == 2:
                holder[0].model.model.layers[0].mlp.register_forward_hook(hook)
            return reward_length(completion_ids)

        own = {"max_steps": 4, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, **options}
        trainer = make_trainer(tmp_path, cls, **own)
        trainer.reward_funcs = [hooks]
        holder.append(trainer)
        use_sampler(trainer)
        trainer.train()
        if cls is FusedGRPOTrainer:
            assert trainer._fused.ladder.level == HEAD
        seen.append(hook.shapes)
        results.append({name: p.detach() for name, p in trainer.model.named_parameters()})
    assert seen[0] and seen[0] == seen[1]
    assert {shape[0] for shape in seen[1]} == {4}
    stock, fused = results
    assert all(relative_error(fused[name], weight) < 1e-5 for name, weight in stock.items())


class Remembering(nn.Module):
    """An MLP of the user's with state of several kinds."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.calls, self.widths = mlp, 0, []
        self.register_buffer("number", torch.zeros(()))
        self.register_buffer("own", torch.zeros(()), persistent=False)

    def forward(self, hidden):
        self.number += 1
        self.calls += 1
        self.widths.append((tuple(hidden.shape), torch.is_grad_enabled(), self.training))
        self.own = self.number.clone()
        return self.mlp(hidden)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [None, "packed"])
def test_state_of_unknown_code_is_neither_bound_anew_nor_lost(tmp_path, layout):
    parts, stock = [], None
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        torch.manual_seed(0)
        model = tiny_model("llama")
        model.model.layers[0].mlp = part = Remembering(model.model.layers[0].mlp)
        before = dict(part.__dict__), part.number, part.widths
        own = {} if cls is GRPOTrainer else {"fused_layout": layout}
        trainer = make_trainer(tmp_path, cls, model=model, max_steps=2, gradient_accumulation_steps=2, **own)
        trainer.train()
        assert part.number is before[1] and part.widths is before[2]
        assert all(part.__dict__[name] is value for name, value in before[0].items() if name != "calls")
        assert part.number == part.own == part.calls == len(part.widths)
        parts.append(part)
    stock, fused = parts
    assert fused.calls == stock.calls
    if layout is None:
        assert fused.widths == stock.widths


def test_a_hook_on_the_model_gets_the_same_output_as_in_stock(tmp_path):
    seen = {}
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = make_trainer(tmp_path, cls)
        trainer.model.register_forward_hook(lambda module, args, output, cls=cls: seen.update({cls: output}))
        loss, gradients = loss_and_gradients(trainer, make_inputs())
        seen[cls, "loss"], seen[cls, "gradients"] = loss, gradients
    assert type(seen[FusedGRPOTrainer]) is type(seen[GRPOTrainer])
    for name, value in seen[GRPOTrainer].items():
        torch.testing.assert_close(seen[FusedGRPOTrainer][name], value)
    torch.testing.assert_close(seen[FusedGRPOTrainer, "gradients"], seen[GRPOTrainer, "gradients"])


def test_log_probs_of_another_model_have_its_own_level(tmp_path):
    trainer, inputs = make_trainer(tmp_path), make_inputs()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    teacher, hook = make_trainer(tmp_path, GRPOTrainer).model, Rows()
    teacher.model.layers[0].mlp.register_forward_hook(hook)
    trainer._get_per_token_logps_and_entropies(teacher, ids, mask, 8)
    assert [shape[:2] for shape in hook.shapes] == [tuple(ids.shape)]
    assert trainer._fused.ladder.level == WINDOW
    assert trainer._fused.ladder.of_call(trainer._fused.engine, teacher).level == HEAD


def test_hooks_that_transformers_adds_at_each_generation_do_not_pile_up(tmp_path):
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, max_steps=3)
    mine = trainer.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    trainer.train()
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    assert mine.id in hooks
    assert len(hooks) <= 2


@pytest.mark.parametrize("leaves", ["eval", "a part"])
def test_a_model_that_is_not_all_in_training_is_put_there_by_the_next_step(tmp_path, leaves):
    modes = []

    class Leaving(TrainerCallback):
        def on_step_end(self, *args, model=None, **kwargs):
            (model if leaves == "eval" else model.model.layers[1].mlp).eval()

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.add_callback(Leaving())
    compute_loss = trainer._fused.compute_loss

    def watched(*args):
        modes.append(all(module.training for module in trainer.model.modules()))
        return compute_loss(*args)

    trainer._fused.compute_loss = watched
    trainer.train()
    assert modes == [True, True]


@pytest.mark.parametrize("of", ["the model", "PEFT's wrapper"])
def test_a_train_method_of_the_users_is_called_in_each_step_as_in_stock(tmp_path, of):
    calls = {}
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        adapters = lora() if of == "PEFT's wrapper" else None
        trainer = make_trainer(tmp_path, cls, peft_config=adapters, max_steps=3, gradient_accumulation_steps=2)
        counted = trainer.model
        train, calls[cls] = counted.train, []

        def counting(mode=True, train=train, of_class=calls[cls]):
            of_class.append(mode)
            return train(mode)

        counted.train = counting
        trainer.train()
    assert calls[FusedGRPOTrainer] == calls[GRPOTrainer]


def test_a_generation_that_evaluates_the_model_and_trains_it_again_finds_its_own_train(tmp_path):
    modes = []

    def reward(completions, **kwargs):
        for mode in (False, True):
            trainer.model.train(mode)
            modes.append({module.training for module in trainer.model.modules()})
        return [0.5] * len(completions)

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.reward_funcs = [reward]
    trainer.train()
    assert modes == [{False}, {True}] * 2


@pytest.mark.parametrize("kind", ["dense", "moe", "shared", "itself"])
def test_a_walk_over_modules_finds_what_torch_s_finds_in_its_order(kind):
    model = tiny_model("moe" if kind == "moe" else "qwen3")
    if kind == "shared":
        model.again, model.nothing = nn.ModuleList([model.lm_head, model.model]), nn.Linear(2, 2, bias=False)
        model.register_module("gone", None)
        model.again[0].other_weight = model.nothing.weight
    if kind == "itself":
        model.model.layers[0].owner = nn.ModuleList([model])
    assert [*map(id, modules_of(model))] == [*map(id, model.modules())]
    assert [*map(id, parameters_of(model))] == [*map(id, model.parameters())]


def test_an_embedding_that_counts_the_tokens_of_a_forward_keeps_stock_s(tmp_path):
    gradients, inputs = [], make_inputs()
    inputs["prompt_ids"], inputs["prompt_mask"] = (
        torch.full((4, 3), 5),
        torch.ones(4, 3, dtype=torch.long),
    )  # one for all
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        torch.manual_seed(0)
        model = tiny_model("llama")
        model.get_input_embeddings().scale_grad_by_freq = True
        trainer = make_trainer(tmp_path, cls, model=model)
        gradients.append(loss_and_gradients(trainer, inputs)[1]["model.embed_tokens.weight"])
    stock, fused = gradients
    assert relative_error(fused, stock) < 1e-6  # single elements cancel, and round otherwise on each processor
