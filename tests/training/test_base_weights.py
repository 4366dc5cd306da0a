"""`fused_keep_base_weights`: adapters that TRL merges for vLLM leave the weights under them to the bit."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat.peft import base_weights_kept
from trl_fused_grpo.parity.tiny import tiny_model


pytestmark = pytest.mark.usefixtures("unchecked")


def adapted(dtype, **options):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(tiny_model("llama").to(dtype), config)


def engine_of(trainer, received):
    """vLLM's in the place of the sampler's: TRL's own synchronisation, whose weights nobody but `received` reads."""
    model = SimpleNamespace(load_weights=lambda weights: received.update((name, w.clone()) for name, w in weights))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    executor = SimpleNamespace(driver_worker=worker)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None)
    if not hasattr(grpo_trainer, "VLLMGeneration"):
        trainer.vllm_mode, trainer.llm = "colocate", llm
        trainer._move_model_to_vllm = GRPOTrainer._move_model_to_vllm.__get__(trainer)
        generate = trainer._generate_single_turn  # the sampler's, where TRL's would have moved them

        def moving(*args, **options):
            trainer._move_model_to_vllm()
            return generate(*args, **options)

        trainer._generate_single_turn = moving
        return
    engine = grpo_trainer.VLLMGeneration.__new__(grpo_trainer.VLLMGeneration)
    engine.model, engine.accelerator, engine.mode, engine.llm = trainer.model, trainer.accelerator, "colocate", llm
    engine.enable_sleep_mode, engine._weight_metadata, engine.is_fsdp_enabled = False, None, False
    engine._dist = getattr(trainer, "_dist", None)  # older engines ask the accelerator
    trainer.vllm_generation = engine


def base_weights(model):
    return {name: w.detach().clone() for name, w in model.named_parameters() if "lora_" not in name}


def trained(folder, cls, dtype=torch.bfloat16, **options):
    """The trainer, weights under adapters before and after some steps, and what vLLM got last."""
    received = {}
    trainer = make_trainer(folder, cls, model=adapted(dtype), learning_rate=0.01, max_steps=4, **options)
    use_sampler(trainer)
    engine_of(trainer, received)
    before = base_weights(trainer.model)
    trainer.train()
    return trainer, before, base_weights(trainer.model), received


def share_changed(before, after):
    return max((before[name] != after[name]).float().mean().item() for name in before)


def test_weights_under_adapters_stay_to_the_bit_while_stock_rounds_them(tmp_path):
    _, before, after, received = trained(tmp_path, FusedGRPOTrainer, fused_keep_base_weights=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    [name] = [name for name in received if name.endswith("layers.0.mlp.down_proj.weight")]
    assert not torch.equal(received[name], before[f"base_model.model.{name[:-7]}.base_layer.weight"])
    _, before, after, _ = trained(tmp_path, GRPOTrainer)
    assert share_changed(before, after) > 0.1


def test_without_the_option_it_is_as_in_stock(tmp_path):
    _, _, expected, _ = trained(tmp_path, GRPOTrainer, torch.float32)
    _, _, found, _ = trained(tmp_path, FusedGRPOTrainer, torch.float32)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


def test_it_trains_what_stock_trains_in_float32(tmp_path):
    """There taking adapters out again rounds by some 1e-8."""
    stock, *_ = trained(tmp_path, GRPOTrainer, torch.float32)
    ours, *_ = trained(tmp_path, FusedGRPOTrainer, torch.float32, fused_keep_base_weights=True)
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_vllm_gets_what_it_gets_in_stock(tmp_path):
    def sent(keep):
        model = adapted(torch.bfloat16)
        with base_weights_kept(model) if keep else torch.no_grad():
            model.merge_adapter()
            merged = base_weights(model)
            model.unmerge_adapter()
        return merged, base_weights(model)

    (mine, kept), (stocks, rounded) = sent(True), sent(False)
    assert all(torch.equal(mine[name], stocks[name]) for name in mine)
    original = base_weights(adapted(torch.bfloat16))
    assert all(torch.equal(kept[name], original[name]) for name in kept)
    assert any(not torch.equal(rounded[name], original[name]) for name in rounded)


def test_a_weight_that_merging_makes_anew_is_the_one_before(tmp_path):
    """As PEFT does with quantized weights."""
    model = adapted(torch.bfloat16)
    base = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    weight, values = base.weight, base.weight.detach().clone()
    with base_weights_kept(model):
        model.merge_adapter()
        base.weight = nn.Parameter(base.weight.detach() + 1, requires_grad=False)
        model.unmerge_adapter()
    assert base.weight is weight and torch.equal(weight, values)
    assert "merge_adapter" not in vars(model)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_where_nothing_is_merged_it_has_no_effect(tmp_path, caplog, has_adapters):
    model = adapted(torch.float32) if has_adapters else tiny_model("llama")
    make_trainer(tmp_path, model=model, fused_keep_base_weights=True)
    reason = "adapters are merged for vLLM alone" if has_adapters else "the model has no adapters"
    assert f"fused_keep_base_weights=True has no effect, because {reason}." in caplog.text


@pytest.mark.parametrize(
    ("dtype", "option", "line"),
    [
        (torch.bfloat16, False, "base weights kept to the bit: rounded at each step, because adapters are merged"),
        (torch.bfloat16, True, "base weights kept to the bit: when adapters are merged for vLLM"),
        (torch.float32, False, None),
    ],
)
def test_the_summary_recommends_it_in_16_bits(tmp_path, dtype, option, line):
    trainer = make_trainer(tmp_path, model=adapted(dtype), fused_keep_base_weights=option)
    assert "base weights" not in str(trainer.fused_summary())
    use_sampler(trainer)
    told = [f"{part.name}: {part.text}" for part in trainer.fused_summary() if part.name.startswith("base weights")]
    assert [text.startswith(line) for text in told] == [True] * (line is not None)


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 4]}, {"use_dora": True}, {"bias": "lora_only"}],
    ids=lambda options: next(iter(options)),
)
def test_whatever_else_peft_trains_the_base_stays(options):
    model = adapted(torch.bfloat16, **options)
    before = base_weights(model)
    with base_weights_kept(model):
        model.merge_adapter()
        model.unmerge_adapter()
    assert all(torch.equal(before[name], weight) for name, weight in base_weights(model).items())


def test_a_synchronisation_that_was_cut_short_does_not_make_merged_weights_the_base():
    model = adapted(torch.float32)
    before = base_weights(model)
    with base_weights_kept(model):
        model.merge_adapter()
    with base_weights_kept(model):
        model.merge_adapter()
        model.merge_adapter()
        model.unmerge_adapter()
    for name, weight in base_weights(model).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)
