"""What the user replaced is found wherever it was replaced; what libraries do to it does not count."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo._compat.libraries import is_library_function
from trl_fused_grpo._compat.torch import modules_of, parameters_of
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training.customisation import (
    MICRO_BATCH_METHODS,
    replaced_backward,
    replaced_behind,
    replaced_method,
    watching_callback,
)
from trl_fused_grpo.training.customised_model import changed_head, changed_module, gradient_hook
from trl_fused_grpo.training.eligibility import replaced_objective, why_forwards_are_not_shared


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path)


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
    ],
    ids=[
        "trl",
        "trl-profiled",
        "trl-decorated",
        "users",
        "users-decorated",
        "users-wrapper",
        "users-partial",
        "trl-partial",
        "users-method",
        "trl-cached",
        "users-cached",
    ],
)
def test_a_function_counts_as_a_librarys_when_all_that_it_wraps_does(function, expected):
    assert is_library_function(function) is expected


def test_nothing_counts_as_replaced_on_an_unchanged_trainer(trainer):
    assert replaced_method(trainer, MICRO_BATCH_METHODS) is None
    assert replaced_method(trainer, ("_generate_and_score_completions",)) is None
    assert all(replaced_behind(trainer, name) is None for name in MICRO_BATCH_METHODS if hasattr(GRPOTrainer, name))
    assert watching_callback(trainer) is None
    assert gradient_hook(trainer.model) is None
    assert replaced_backward(trainer.accelerator) is None
    assert changed_module(trainer.model.modules()) is None
    assert changed_head(trainer.model, trainer.model, [trainer.model.lm_head]) is None


@pytest.mark.parametrize("name", MICRO_BATCH_METHODS)
def test_a_replaced_method_is_found_in_a_subclass_on_the_instance_and_in_trls_class(trainer, monkeypatch, name):
    assert replaced_method(trainer, [name]) is None
    subclass = type("Mine", (FusedGRPOTrainer,), {name: users_function})
    monkeypatch.setattr(trainer, "__class__", subclass)
    assert replaced_method(trainer, [name]) == f"Mine.{name}"
    monkeypatch.undo()
    monkeypatch.setitem(vars(trainer), name, users_function)
    assert replaced_method(trainer, [name]) == f"the instance's {name}"
    monkeypatch.undo()
    if hasattr(GRPOTrainer, name):
        monkeypatch.setattr(GRPOTrainer, name, users_function)
        assert replaced_method(trainer, [name]) == f"GRPOTrainer.{name}"


def test_the_objective_counts_as_replaced_with_any_method_that_trls_loss_calls(trainer, monkeypatch):
    assert "get_off_policy_mask" in trl_compat.OBJECTIVE_METHODS
    for name in ("_compute_loss", *trl_compat.OBJECTIVE_METHODS):
        monkeypatch.setattr(GRPOTrainer, name, users_function)
        assert replaced_objective(trainer) == f"GRPOTrainer.{name}"
        monkeypatch.undo()


def add_forward_hook(module):
    return module.register_forward_hook(lambda *_: None)


def add_forward_pre_hook(module):
    return module.register_forward_pre_hook(lambda *_: None)


def add_backward_hook(module):
    return module.register_full_backward_hook(lambda *_: None)


def replace_forward(module):
    module.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), module)


@pytest.mark.parametrize("change", [add_forward_hook, add_forward_pre_hook, add_backward_hook, replace_forward])
def test_the_users_hooks_and_forwards_are_found_in_every_module(trainer, change):
    causal_lm = trainer.model
    change(causal_lm.model.layers[1].mlp)
    assert "LlamaMLP" in changed_module(causal_lm.modules())
    assert changed_head(causal_lm, causal_lm, [causal_lm.lm_head]) is None
    change(causal_lm.lm_head)
    assert "Linear" in changed_head(causal_lm, causal_lm, [causal_lm.lm_head])


def test_a_forward_replaced_in_a_librarys_class_counts_but_not_one_in_the_users_class(trainer, monkeypatch):
    layer = type(trainer.model.model.layers[0])
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    assert changed_module(trainer.model.modules()) == f"{layer.__name__}.forward"
    monkeypatch.undo()

    class Mine(layer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    trainer.model.model.layers[0].__class__ = Mine
    assert changed_module(trainer.model.modules()) is None


def test_a_hook_on_every_module_is_found(trainer):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert changed_module(trainer.model.modules()) == "a hook on every module"
    finally:
        handle.remove()


def test_what_libraries_do_to_a_model_does_not_count(tmp_path):
    pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, bf16=True)
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from peft import LoraConfig, get_peft_model

    trainer.model.enable_input_require_grads()
    add_hook_to_module(trainer.model.model.layers[0], AlignDevicesHook(io_same_device=True))
    model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
    prepared = trainer.accelerator.prepare_model(model)
    assert changed_module(prepared.modules()) is None
    assert changed_head(prepared, trainer.model, [trainer.model.lm_head]) is None


def test_gradient_hooks_callbacks_and_a_replaced_backward_forbid_shared_forwards(trainer):
    class Watching(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            pass

    assert why_forwards_are_not_shared(trainer, "packed") is None
    handle = trainer.model.lm_head.weight.register_hook(lambda gradient: gradient)
    assert "the gradient of lm_head.weight" in why_forwards_are_not_shared(trainer, "packed")
    handle.remove()
    trainer.add_callback(Watching)
    assert "Watching.on_substep_end" in why_forwards_are_not_shared(trainer, "packed")
    trainer.remove_callback(Watching)
    trainer.accelerator.backward = lambda loss: loss.backward()
    assert "backward" in why_forwards_are_not_shared(trainer, "packed")


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


class WithPenalty(FusedGRPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) + 0.0


def test_the_log_says_once_that_a_replaced_method_forbids_shared_forwards(tmp_path, caplog):
    make_trainer(tmp_path, WithPenalty, max_steps=2, gradient_accumulation_steps=2).train()
    logged = [r.message for r in caplog.records if "WithPenalty.compute_loss" in r.message]
    assert len(logged) == 1
    assert logged[0].startswith("Every micro-batch has a forward of its own")


def test_the_log_says_once_why_rows_keep_their_padding(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    trainer.model.model.layers[0].register_forward_hook(lambda *_: None)
    trainer.train()
    logged = [r.message for r in caplog.records if "hook on LlamaDecoderLayer" in r.message]
    assert len(logged) == 1
    assert "fused_layout" in logged[0]


def test_hooks_that_transformers_adds_at_each_generation_do_not_pile_up(tmp_path):
    trainer = make_trainer(tmp_path, gradient_checkpointing=True, max_steps=3)
    mine = trainer.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    trainer.train()
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    assert mine.id in hooks
    assert len(hooks) <= 2


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
