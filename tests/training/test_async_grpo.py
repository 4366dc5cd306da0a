"""The fused `AsyncGRPOTrainer` against TRL's, on the same made-up rollouts."""

import copy
import functools
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.tiny_training import loss_and_gradients
from trl_fused_grpo import fuse, fuse_config, patch
from trl_fused_grpo._compat import trainers
from trl_fused_grpo._compat.required import NEWEST_TRL, TRL
from trl_fused_grpo.parity.tiny import save_checkpoint, tokenizer


if TRL < NEWEST_TRL:
    pytest.skip("earlier releases have none, or another one", allow_module_level=True)

import trl.experimental.async_grpo as async_grpo
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tests.async_rollouts import (
    NO_TRANSFER,
    MadeUpWorker,
    make_batch,
    make_samples,
    make_trainer,
    stock_on_cpu,
    train,
)
from trl_fused_grpo.async_grpo import FusedAsyncGRPOTrainer


ATTENTION = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
TRAININGS = {
    "plain": {},
    "without checkpointing": {"gradient_checkpointing": False, "temperature": 0.7, "epsilon_high": 0.4},
    "LoRA": {"peft_config": LoraConfig(**ATTENTION)},
    "LoRA with a copy of the head": {"peft_config": LoraConfig(**ATTENTION, modules_to_save=["lm_head"])},
    "LoRA with dropout": {"peft_config": LoraConfig(**ATTENTION, lora_dropout=0.3)},
    "experts": {"kind": "qwen3-moe", "router_aux_loss_coef": 0.1},
    "experts without their loss": {"kind": "moe", "router_aux_loss_coef": 0.0},
    "tied": {"kind": "tied"},
    "soft caps and windows": {"kind": "gemma2"},
    "scaled logits": {"kind": "scaled"},
    "rotations that follow the length": {"kind": "dynamic-rope"},
    "a text model of one with images": {"kind": "qwen2.5-vl"},
    "recomputed": {"fused_backward": "recompute"},
    "small chunks": {"fused_logits_mib": 0.01},
    "a fixed count": {"token_budget": 0, "per_device_train_batch_size": 5},
    "single samples": {"token_budget": 0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
}


def distance(found, expected):
    """Of all tensors together, relative to the expected ones, which are not zero."""
    assert found.keys() == expected.keys()
    size = sum(value.square().sum() for value in expected.values()) ** 0.5
    return float(sum((found[name] - value).square().sum() for name, value in expected.items()) ** 0.5 / size)


def metrics_of(trainer):
    """The last of each metric."""
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def same(value):
    return pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)


def assert_same_log(found, expected):
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for entry, values in zip(found, expected, strict=True):
        numbers = {name: value for name, value in values.items() if value is not None}
        assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
        assert all(entry[name] is None for name in values.keys() - numbers.keys())


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_ten_steps_are_those_of_stock(tmp_path, options):
    with stock_on_cpu():
        expected, expected_log = train(make_trainer(tmp_path, fused=False, **copy.deepcopy(options)))
    trainer = make_trainer(tmp_path, fused=True, **copy.deepcopy(options))
    moved, log = train(trainer)
    # SGD adds small steps to weights, each with the rounding of the weights
    assert distance(moved, expected) < 3e-5
    assert_same_log(log, expected_log)
    assert trainer._fused.is_on
    shares = [entry["fused/rows_recomputed"] for entry in trainer.state.log_history[:-1]]
    assert len(shares) == 10
    assert "fused_backward" in options or max(shares) == 0  # as forecast
    trainer.detach()


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("samples", [make_samples(1), make_samples(2)[:1]], ids=["many", "one"])
def test_loss_gradients_and_metrics_are_those_of_stock(tmp_path, kind, samples):
    with stock_on_cpu():
        stock = make_trainer(tmp_path, fused=False, kind=kind)
        expected_loss, expected = loss_and_gradients(stock, make_batch(stock, samples))
    trainer = make_trainer(tmp_path, fused=True, kind=kind)
    loss, gradients = loss_and_gradients(trainer, make_batch(trainer, samples))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert distance(gradients, expected) < 1e-5
    assert metrics_of(trainer) == {name: same(value) for name, value in metrics_of(stock).items()}
    stats = trainer.fused_stats
    assert (stats.backward, stats.recomputed) == ("forecast", 0)
    assert stats.rows <= sum(int(sample.completion_mask.sum()) for sample in samples)


def sample_by_sample(model):
    """What TRL's loss asks of a model, from plain forwards: one for each path of the trie."""

    def call(input_ids, shift_labels, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, **_):
        parts, begins, ends = [], tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
        for path in range(len(begins) - 1):
            seen = tree_kv_index[ends[path] : ends[path + 1]]
            logits = model(input_ids=input_ids[:, seen], use_cache=False).logits[0]
            parts.append(logits[begins[path] - begins[path + 1] :].log_softmax(-1))
        log_p = torch.cat(parts)
        log_probs = log_p.gather(-1, shift_labels.clamp(min=0).T)[:, 0]
        return SimpleNamespace(log_probs=log_probs[None], entropy=-(log_p.exp() * log_p).sum(-1)[None])

    return call


REFUSED = ["gpt-oss", "qwen3-next", "lfm2", "falcon-h1", "jamba", "llama4", "qwen3.5"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_stock_refuses_are_those_of_single_samples(tmp_path, kind):
    with stock_on_cpu(), pytest.raises(ValueError, match=r"layers|sinks"):
        make_trainer(tmp_path, fused=False, kind=kind)
    trainer = make_trainer(tmp_path, fused=True, kind=kind, gradient_checkpointing=False, router_aux_loss_coef=0.0)
    batch = make_batch(trainer, make_samples(1))
    loss, gradients = loss_and_gradients(trainer, batch)
    metrics = metrics_of(trainer)
    trainer.model.zero_grad()
    expected_loss = AsyncGRPOTrainer.compute_loss(trainer, sample_by_sample(trainer.model), batch)
    expected_loss.backward()
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)
    assert distance(gradients, expected) < 1e-5
    assert metrics == {name: same(value) for name, value in metrics_of(trainer).items()}


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3-next"])
def test_such_models_train_to_the_end(tmp_path, kind):
    moved, log = train(make_trainer(tmp_path, fused=True, kind=kind, max_steps=2))
    assert all(value.isfinite().all() for value in moved.values())
    assert log[0]["grad_norm"] > 0


class OwnObjective(AsyncGRPOTrainer):
    """Its loss is not TRL's, so that the gradient is not as forecast, or there is no forecast."""

    asks_super = True

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.asks_super:
            return 2 * super().compute_loss(model, inputs, *args, **kwargs).square()
        mask, picked = inputs["attention_mask"].bool(), inputs["token_index"] >= 0
        rows = {name: inputs[name][mask][None] for name in ("input_ids", "position_ids", "shift_labels")}
        names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        rows |= {name: inputs[name][inputs[name] >= 0] for name in names}
        longest = dict(
            zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), inputs["tree_max_seqlens"][0].tolist(), strict=True)
        )
        outputs = model(**rows, **longest, fused_lm_head=True)
        logps, entropies = (x.flatten()[inputs["token_index"][picked]] for x in (outputs.log_probs, outputs.entropy))
        return (logps.square() - entropies).mean()


@pytest.mark.parametrize("asks_super", [True, False], ids=["of TRL's loss", "of its own"])
def test_an_objective_of_the_users_own_trains_as_in_stock(tmp_path, monkeypatch, asks_super):
    monkeypatch.setattr(OwnObjective, "asks_super", asks_super)
    with stock_on_cpu():
        expected, expected_log = train(make_trainer(tmp_path, fused=False, cls=OwnObjective, max_steps=3))
    moved, log = train(make_trainer(tmp_path, fused=True, cls=OwnObjective, max_steps=3))
    assert distance(moved, expected) < 3e-5
    assert_same_log(log, expected_log)


@pytest.mark.nightly
def test_compiled_layers_train_as_stock(tmp_path):
    with stock_on_cpu():
        expected, _ = train(make_trainer(tmp_path, fused=False, max_steps=3))
    moved, _ = train(make_trainer(tmp_path, fused=True, max_steps=3, fused_compile=True))
    assert distance(moved, expected) < 3e-5


def test_a_second_training_goes_on_as_in_stock(tmp_path):
    def twice(trainer):
        train(trainer)
        trainer.args.max_steps = 4
        trainer._last_step_end_time = None
        return train(trainer)[0]

    with stock_on_cpu():
        expected = twice(make_trainer(tmp_path, fused=False, max_steps=2))
    trainer = make_trainer(tmp_path, fused=True, max_steps=2)
    trainer.detach()
    assert distance(twice(trainer), expected) < 3e-5


def test_unknown_model_code_keeps_trls_call(tmp_path, caplog):
    trainer = make_trainer(tmp_path, fused=True, max_steps=2)
    trainer.model.model.layers[0].register_forward_hook(lambda *_: None)
    with stock_on_cpu():
        moved, _ = train(trainer)
        expected, _ = train(make_trainer(tmp_path, fused=False, max_steps=2))
    assert "runs TRL's own model call, because a hook on LlamaDecoderLayer" in caplog.text
    assert all(torch.equal(moved[name], value) for name, value in expected.items())


def test_without_the_fused_loss_it_is_stock(tmp_path):
    with stock_on_cpu():
        moved, log = train(make_trainer(tmp_path, fused=True, use_liger_loss=False, max_steps=2))
        expected, expected_log = train(make_trainer(tmp_path, fused=False, max_steps=2))
    assert all(torch.equal(moved[name], value) for name, value in expected.items())
    assert log == expected_log


@pytest.mark.parametrize(
    "option",
    [{"fused_memory": 0.5}, {"kl_estimator": "k1"}, {"fused_layout": "padded"}, {"fused_share_prompts": False}],
    ids=lambda option: next(iter(option)),
)
def test_options_that_do_not_apply_are_refused_by_name(tmp_path, option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* does not apply to AsyncGRPOTrainer"):
        make_trainer(tmp_path, fused=True, **option)


def test_what_its_rows_cannot_serve_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_fused_grpo.training.findings.is_tried", lambda _: False)
    with pytest.raises(ValueError, match=r"cannot train conv of Lfm2ForCausalLM.* was not tried"):
        make_trainer(tmp_path, fused=True, kind="lfm2")


def test_fuse_gives_its_class_and_configuration():
    assert fuse(AsyncGRPOTrainer) is FusedAsyncGRPOTrainer is fuse(FusedAsyncGRPOTrainer)
    assert issubclass(fuse(OwnObjective), (OwnObjective, FusedAsyncGRPOTrainer))
    assert fuse_config(AsyncGRPOConfig) is fuse_config(AsyncGRPOConfig)
    args = fuse_config(AsyncGRPOConfig)(output_dir="out", use_cpu=True, bf16=False, fused_compile=False)
    assert (args.use_liger_loss, args.fused_compile, args.max_staleness) == (True, False, 4)


def test_the_example_of_its_docstring_runs(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", inspect.getdoc(FusedAsyncGRPOTrainer), re.DOTALL)
    module = trainers.async_module()

    class Worker(MadeUpWorker):
        def __init__(self, **_):
            super().__init__(make_samples())
            self._loop_kwargs = {}

    monkeypatch.setattr(module, "AsyncRolloutWorker", Worker)
    monkeypatch.setattr(module, "WeightTransferClient", lambda **_: NO_TRANSFER)
    small = functools.partial(fuse_config, AsyncGRPOConfig)
    options = {"use_cpu": True, "bf16": False, "max_steps": 1, "token_budget": 40, "report_to": "none"}
    monkeypatch.setattr(small(), "__init__", functools.partialmethod(small().__init__, **options))
    monkeypatch.chdir(tmp_path)
    folder = save_checkpoint("llama", tmp_path, torch.float32)
    tokenizer().save_pretrained(folder)
    given = {"model_name": str(folder), "reward": len, "dataset": Dataset.from_dict({"prompt": ["w5 w6"]})}
    exec(code, given)
    assert given["trainer"].state.global_step == 1


def test_a_patch_reaches_it(tmp_path):
    with patch(fused_backward="recompute"):
        assert async_grpo.AsyncGRPOTrainer is FusedAsyncGRPOTrainer
        trainer = make_trainer(tmp_path, fused=False)  # by the name that was imported before
        assert isinstance(trainer, FusedAsyncGRPOTrainer)
        assert trainer._fused.options.fused_backward == "recompute"
    assert async_grpo.AsyncGRPOTrainer is AsyncGRPOTrainer


def test_another_interface_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(trainers.async_module(), "add_fused_lm_head")
    monkeypatch.setattr(AsyncGRPOTrainer, "compute_loss", lambda self, model, inputs: model(**inputs))
    with pytest.raises(ImportError, match=r"has no .*add_fused_lm_head, advantages.*tree_kv_index: install trl==1\.16"):
        trainers.check_async(AsyncGRPOTrainer)
