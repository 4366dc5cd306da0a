"""FusedGRPOTrainer with a real, colocated vLLM engine (CPU build): stock TRL replays its micro-batches and must agree.

One engine serves the whole module. Stock needs none: every micro-batch that the fused trainer saw is fed to a stock
trainer with the same weights, which computes its own old log-probs and importance ratios.
"""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_weights import keep_linear_weights


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS = 3
ACCUMULATION = 2
ROWS = 4  # completions per micro-batch
TOLERANCE = 1e-5  # relative, float32
# Ratios are within a few percent of 1 here, so that bounds this tight clip some of them and leave others
BOUNDS = {
    "token_truncate": (0.99, 1.01),
    "token_mask": (0.99, 1.01),
    "sequence_truncate": (0.95, 1.05),
    "sequence_mask": (0.95, 1.05),
}

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with a byte-level tokenizer trained on the standard library's own source."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = ByteLevelBPETokenizer()
    corpus = [inspect.getsource(module) for module in (ast, inspect)]
    bpe.train_from_iterator(corpus, vocab_size=1024, special_tokens=["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,  # far from uniform, so that vLLM's bf16 rounding shows in the log-probs
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between the completions of a random model."""
    return [float(sum(ids) % 11) + len(set(ids)) / len(ids) for ids in completion_ids]


def trainer_arguments(checkpoint: Path, output: Path, **options: Any) -> dict[str, Any]:
    """Constructor arguments shared by the fused trainer and the stock one."""
    import trl
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=ROWS,
        max_completion_length=16,
        max_steps=STEPS,
        learning_rate=1e-3,
        vllm_importance_sampling_mode="token_truncate",
        max_grad_norm=1e9,  # the norm is logged, the gradients stay as they are
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    prompts = [f"def function_{i}(argument):" for i in range(16)]
    return {
        "model": str(checkpoint),
        "reward_funcs": distinct_tokens,
        "args": config,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
    }


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients_of(model: torch.nn.Module) -> Weights:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """A FusedGRPOTrainer after its steps; `.record` holds each step's weights, micro-batches, losses and gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        keep_linear_weights(patch.setattr)

        from transformers import TrainerCallback

        from trl_fused_grpo import FusedGRPOTrainer

        class Recording(FusedGRPOTrainer):
            def compute_loss(self, model, inputs, **kwargs):
                loss = super().compute_loss(model, inputs, **kwargs)
                self.record[-1]["inputs"].append({name: tensor.clone() for name, tensor in inputs.items()})
                self.record[-1]["losses"].append(loss.item())
                return loss

        class Snapshots(TrainerCallback):
            def on_step_begin(self, args, state, control, model, **kwargs):
                trainer.record.append({"weights": weights_of(model), "inputs": [], "losses": []})

            def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
                trainer.record[-1]["gradients"] = gradients_of(model)

        arguments = trainer_arguments(
            checkpoint,
            tmp_path_factory.mktemp("fused"),
            use_liger_loss=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=128,
        )
        trainer = Recording(**arguments, callbacks=[Snapshots()])
        trainer.record = []
        trainer.train()
        yield trainer


@pytest.fixture(scope="module")
def stock(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """A stock GRPOTrainer without an engine, whose `_prepare_inputs` returns recorded micro-batches as they are."""
    from trl import GRPOTrainer

    class OnRecordedBatch(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return inputs

    trainer = OnRecordedBatch(**trainer_arguments(checkpoint, tmp_path_factory.mktemp("stock")))
    trainer.use_vllm = True  # apply the importance ratios
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    return trainer


def importance_ratio(trainer, log_ratio: torch.Tensor) -> torch.Tensor:
    """TRL's importance ratio from `log_ratio` [B, T] (zero off the mask), under the trainer's mode and clip bounds."""
    mode = trainer.vllm_importance_sampling_mode
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio * (ratio >= (low or 0.0)) * (ratio <= high)


def with_stock_logps(stock, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as stock makes it: with stock's own old log-probs, and the ratios that follow from them."""
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].size(1)
    with torch.no_grad():
        logps = stock._get_per_token_logps_and_entropies(stock.model, input_ids, attention_mask, width)[0]
    log_ratio = (logps - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]
    return inputs | {"old_per_token_logps": logps, "importance_sampling_ratio": importance_ratio(stock, log_ratio)}


def set_weights(model: torch.nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.zero_grad(set_to_none=True)


def assert_gradients_equal(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


def test_training_logs_importance_ratios_other_than_one(trained):
    logs = [entry for entry in trained.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == list(range(1, STEPS + 1))
    for entry in logs:
        assert entry["grad_norm"] > 0
        assert entry["fused/rows_recomputed"] == 0.0  # the forecast knew the ratios
        # bf16 in the engine against float32 here: never zero, and small only if the weights were synced
        difference = entry["sampling/sampling_logp_difference/mean"]
        assert 1e-5 < difference < 0.1
        assert entry["sampling/sampling_logp_difference/max"] > difference
        low, mean, high = (entry[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))
        assert 0 < low < mean < high
        assert mean == pytest.approx(1.0, abs=0.2)


def test_logged_sampling_metrics_equal_those_from_stocks_log_probs(trained, stock):
    logs = [entry for entry in trained.state.log_history if "loss" in entry]
    for entry, step in zip(logs, trained.record, strict=True):
        set_weights(stock.model, step["weights"])
        batches = [with_stock_logps(stock, inputs) for inputs in step["inputs"]]
        ratios = torch.cat(
            [batch["importance_sampling_ratio"][batch["completion_mask"].bool()] for batch in batches]
        )  # [tokens]
        differences = torch.cat(
            [
                (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
                for batch in batches
            ]
        ).abs()
        expected = {
            "importance_sampling_ratio/min": ratios.min(),
            "importance_sampling_ratio/mean": ratios.mean(),
            "importance_sampling_ratio/max": ratios.max(),
            "sampling_logp_difference/mean": differences.mean(),
            "sampling_logp_difference/max": differences.max(),
        }
        for name, value in expected.items():
            assert entry[f"sampling/{name}"] == pytest.approx(value.item(), rel=TOLERANCE, abs=TOLERANCE), name


def test_stock_replays_every_step_with_the_same_losses_and_gradients(trained, stock):
    assert len(trained.record) == STEPS
    for step in trained.record:
        set_weights(stock.model, step["weights"])
        assert len(step["inputs"]) == ACCUMULATION
        losses = [stock.training_step(stock.model, with_stock_logps(stock, inputs), None) for inputs in step["inputs"]]
        assert [loss.item() for loss in losses] == pytest.approx(step["losses"], rel=TOLERANCE, abs=1e-6)
        assert_gradients_equal(step["gradients"], gradients_of(stock.model))


@pytest.mark.parametrize("mode", BOUNDS)
def test_every_importance_sampling_mode_gives_stocks_loss_and_gradients(trained, stock, mode, monkeypatch):
    low, high = BOUNDS[mode]
    for trainer in (trained, stock):
        monkeypatch.setattr(trainer, "vllm_importance_sampling_mode", mode)
        monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_min", low)
        monkeypatch.setattr(trainer, "vllm_importance_sampling_clip_max", high)
    set_weights(stock.model, weights_of(trained.model))
    trained.model.zero_grad(set_to_none=True)
    trained.model.train()
    rows = [{"prompt": f"class Mode{i // ROWS}:"} for i in range(6 * ROWS)]

    inputs = trained._generate_and_score_completions(rows)
    stock_inputs = with_stock_logps(stock, inputs)
    ratios = stock_inputs["importance_sampling_ratio"]
    clipped = ratios == 0 if mode.endswith("mask") else (ratios == low) | (ratios == high)
    assert clipped.any()
    assert not clipped.all()

    loss = trained.compute_loss(trained.model, inputs)
    loss.backward()
    stock_loss = stock.compute_loss(stock.model, stock_inputs)
    stock_loss.backward()
    assert loss.item() == pytest.approx(stock_loss.item(), rel=TOLERANCE, abs=1e-6)
    assert_gradients_equal(gradients_of(trained.model), gradients_of(stock.model))


def test_the_engine_gets_merged_weights_and_those_under_the_adapters_stay(trained, checkpoint):
    """TRL's own synchronisation of a bfloat16 model with LoRA into the engine, as `fused_keep_base_weights` has it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from trl_fused_grpo._compat.peft import base_weights_kept

    adapters = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16), adapters)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    expected = (layer.base_layer.weight + layer.get_delta_weight("default")).to(torch.bfloat16)
    before, engine = weights_of(model), copy.copy(trained.vllm_generation)
    engine.model = model
    try:
        with base_weights_kept(model):
            engine.sync_weights()
        worker = engine.llm.llm_engine.model_executor.driver_worker
        loaded = worker.model_runner.model.get_parameter("model.layers.0.mlp.down_proj.weight")
        torch.testing.assert_close(loaded.to(torch.bfloat16), expected, rtol=1e-2, atol=1e-2)
    finally:
        trained.vllm_generation.sync_weights()
    after = weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
