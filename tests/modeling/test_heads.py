"""Every kind of head: low-rank adapters, PEFT's wrappers, scales, softcaps, quantized bases and prompts."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.oracle import KnownGradients, dense_logps, relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer, FusedStats, LMHead, fused_linear_logps, read_lm_head
from trl_fused_grpo.modeling.output_projection import layer_before_head, output_projection
from trl_fused_grpo.ops import chunked_linear
from trl_fused_grpo.ops.lm_head import LowRank
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config, tiny_model
from trl_fused_grpo.training import state


peft = pytest.importorskip("peft")

N, H, V, R = 37, 24, 83, 4


class LowRankProblem:
    """Hidden states, a head and two low-rank terms, one of them of another rank."""

    def __init__(self, bias=True, train_weight=False, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        self.frozen = {"weight": randn(V, H) / H**0.5}
        self.leaves = {
            "hidden": randn(N, H),
            "a0": randn(R, H),
            "b0": randn(V, R),
            "a1": randn(3, H),
            "b1": randn(V, 3),
        }
        if bias:
            self.leaves["bias"] = randn(V)
        if train_weight:
            self.leaves["weight"] = self.frozen.pop("weight")
        self.leaves = {name: value.to(dtype).requires_grad_() for name, value in self.leaves.items()}
        self.frozen = {name: value.to(dtype) for name, value in self.frozen.items()}
        self.targets = torch.randint(V, (N,), generator=generator).to(device)
        self.grads = randn(N)

    def fused(self, backward="auto", forecast=None):
        t = {**self.leaves, **self.frozen}
        low_rank = (LowRank(t["a0"], t["b0"], 0.5), LowRank(t["a1"], t["b1"], 0.3))
        head = LMHead(t["weight"], t.get("bias"), logit_scale=1.2, softcap=9.0, low_rank=low_rank)
        stats = FusedStats()
        logps, entropies = fused_linear_logps(
            t["hidden"], head, self.targets, 0.8, forecast, backward, logits_mib=0.004, stats=stats
        )
        return (logps, entropies, *torch.autograd.grad((logps * self.grads).sum(), self.leaves.values())), stats

    def truth(self):
        leaves = {name: value.detach().double().requires_grad_() for name, value in self.leaves.items()}
        t = {**leaves, **{name: value.double() for name, value in self.frozen.items()}}
        weight = t["weight"] + 0.5 * t["b0"] @ t["a0"] + 0.3 * t["b1"] @ t["a1"]
        logps, entropies = dense_logps(t["hidden"], weight, self.targets, t.get("bias"), 0.8, 1.2, 9.0)
        return logps, entropies, *torch.autograd.grad((logps * self.grads).sum(), leaves.values())


@pytest.mark.parametrize("backward", ["forecast", "recompute"])
@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen-weight", "trained-weight"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_low_rank_terms_are_exact_and_trained(backward, train_weight, bias):
    problem = LowRankProblem(bias, train_weight)
    values, stats = problem.fused(backward, KnownGradients(problem.grads) if backward == "forecast" else None)
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= 2e-6, errors
    assert (stats.backward, stats.recomputed) == (backward, 0 if backward == "forecast" else N)


def test_a_frozen_weight_beside_low_rank_terms_costs_no_gradient_of_its_size(monkeypatch):
    shapes = []
    add = chunked_linear.add_matmul
    monkeypatch.setattr(
        chunked_linear, "add_matmul", lambda a, b, out: (shapes.append(tuple(out.shape)), add(a, b, out))
    )
    problem = LowRankProblem()
    problem.fused(forecast=KnownGradients(problem.grads))
    assert set(shapes) == {(V, R + 3)}


def test_low_rank_terms_without_gradient_run_as_two_matmuls():
    problem = LowRankProblem(bias=False)
    for name in ("a0", "b0", "a1", "b1"):
        problem.frozen[name] = problem.leaves.pop(name).detach()
    values, stats = problem.fused()
    assert stats.backward == "frozen"
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= 2e-6, errors


def test_a_temperature_for_each_row_is_refused_under_a_softcap():
    head = LMHead(torch.randn(V, H), softcap=5.0)
    with pytest.raises(ValueError, match="does not go with a softcap"):
        fused_linear_logps(torch.randn(N, H), head, torch.zeros(N, dtype=torch.long), torch.ones(N))


def test_dropout_falls_on_the_low_rank_term_alone():
    hidden, targets = torch.ones(N, H), torch.zeros(N, dtype=torch.long)
    weight, a, b = torch.randn(V, H), torch.randn(R, H), torch.randn(V, R)
    torch.manual_seed(5)
    logps, _ = fused_linear_logps(hidden, LMHead(weight, low_rank=(LowRank(a, b, 2.0, dropout=0.4),)), targets)
    torch.manual_seed(5)
    dropped = nn.functional.dropout(hidden, 0.4)
    logits = hidden @ weight.T + 2.0 * dropped @ a.T @ b.T
    assert relative_error(logps, logits.log_softmax(-1)[:, 0]) < 1e-6


# --- PEFT's wrappers, read from a model -------------------------------------------------------------------------------


def adapted(config, kind="llama"):
    """A tiny model with an adapter, and the causal language model inside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(kind))
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return wrapped, wrapped.get_base_model()


def lora(*targets, **options):
    return peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), task_type="CAUSAL_LM", **options)


def assert_same_as_the_model(wrapped):
    """Log-probs through `read_lm_head` equal those of the model's own logits."""
    causal_lm = wrapped.get_base_model()
    ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = causal_lm.base_model(input_ids=ids).last_hidden_state.flatten(0, 1)
        logps, _ = fused_linear_logps(hidden, read_lm_head(causal_lm), ids.flatten())
        expected = causal_lm(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
    assert relative_error(logps, expected.gather(-1, ids.flatten()[:, None]).squeeze(-1)) < 1e-6
    return logps


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_lora_on_the_head_follows_what_is_active_disabled_and_merged(kind):
    wrapped, _ = adapted(lora("lm_head", "q_proj", lora_dropout=0.3), kind)
    wrapped.add_adapter("second", lora("lm_head"))
    nn.init.normal_(wrapped.get_base_model().lm_head.lora_B["second"].weight, std=0.2)
    wrapped.eval()
    first = assert_same_as_the_model(wrapped)
    wrapped.set_adapter("second")
    second = assert_same_as_the_model(wrapped)
    with wrapped.disable_adapter():
        neither = assert_same_as_the_model(wrapped)
    wrapped.base_model.set_adapter(["default", "second"])
    both = assert_same_as_the_model(wrapped)
    results = [first, second, neither, both]
    assert all(relative_error(x, y) > 1e-3 for i, x in enumerate(results) for y in results[:i])
    wrapped.merge_adapter()
    merged = assert_same_as_the_model(wrapped)
    if kind != "tied":  # there merging moves the embeddings too
        assert relative_error(merged, both) < 1e-5
        with wrapped.disable_adapter():
            assert relative_error(assert_same_as_the_model(wrapped), neither) < 1e-5


def test_bfloat16_logits_with_lora_are_no_further_from_the_truth_than_pefts():
    _, causal_lm = adapted(lora("lm_head"))
    causal_lm.bfloat16()
    hidden, targets = torch.randn(N, 64, dtype=torch.bfloat16), torch.randint(VOCAB_SIZE, (N,))

    def logps_of(logits):
        return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)

    logps, _ = fused_linear_logps(hidden, read_lm_head(causal_lm), targets)
    pefts = logps_of(causal_lm.lm_head(hidden).float())
    truth = logps_of(causal_lm.double().lm_head(hidden.double()))
    assert relative_error(logps, truth) <= relative_error(pefts, truth)


def test_loras_own_bias_counts():
    wrapped, causal_lm = adapted(lora("lm_head", lora_bias=True))
    nn.init.normal_(causal_lm.lm_head.lora_B["default"].bias)
    assert_same_as_the_model(wrapped)


def test_a_trained_copy_of_the_head_is_used_while_its_adapter_is():
    wrapped, causal_lm = adapted(lora("q_proj", modules_to_save=["lm_head"]))
    copy = causal_lm.lm_head.modules_to_save["default"]
    nn.init.normal_(copy.weight)
    assert read_lm_head(causal_lm).weight is copy.weight
    with wrapped.disable_adapter():
        assert read_lm_head(causal_lm).weight is causal_lm.lm_head.original_module.weight
        assert_same_as_the_model(wrapped)
    assert_same_as_the_model(wrapped)


REFUSED = {
    "dora": (lora("lm_head", use_dora=True), "DoRA|Dora"),
    "loha": (peft.LoHaConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"), "not plain LoRA"),
    "ia3": (
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], task_type="CAUSAL_LM"),
        "not plain LoRA",
    ),
    "trainable-tokens": (lora("q_proj", trainable_token_indices=[3, 4]), "trainable tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_more_than_a_low_rank_term_are_refused_with_the_reason(name):
    config, message = REFUSED[name]
    _, causal_lm = adapted(config, "tied")
    with pytest.raises(ValueError, match=message) as error:
        output_projection(causal_lm)
    assert "use_liger_loss=False" in str(error.value)


# --- in the trainer ---------------------------------------------------------------------------------------------------


class DenseTrainer(FusedGRPOTrainer):
    """TRL's objective on log-probabilities from the model's own logits."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        log_p = (logits.double() / self.temperature).log_softmax(-1)
        logps = log_p.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1).float()
        entropies = -(log_p.exp() * log_p).sum(-1).float()
        from trl_fused_grpo._compat.trl import RETURNS_AUX_LOSS

        return (logps, entropies, None) if RETURNS_AUX_LOSS else (logps, entropies)


def pair(folder, config, kind="llama", **options):
    """A dense and a fused trainer with the same adapter."""
    trainers = []
    for cls in (DenseTrainer, FusedGRPOTrainer):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model_config(kind))
        trainer = make_trainer(folder, cls, model=model, peft_config=config, **options)
        generator = torch.Generator().manual_seed(1)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                with torch.no_grad():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        trainers.append(trainer)
    return trainers


@pytest.mark.parametrize("old_logps", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_lora_on_the_head_trains_in_the_trainer(tmp_path, kind, old_logps):
    inputs = make_inputs(**({"old_per_token_logps": -9.0 * torch.ones(4, 8)} if old_logps else {}))
    dense, fused = pair(tmp_path, lora("lm_head", "q_proj"), kind)
    loss, gradients = loss_and_gradients(dense, inputs)
    fused_loss, fused_gradients = loss_and_gradients(fused, inputs)
    assert (fused.fused_stats.backward, fused.fused_stats.recomputed) == ("forecast", 0)
    assert relative_error(fused_loss, loss) < 1e-5
    assert gradients.keys() == fused_gradients.keys()
    assert sum("lm_head.lora_" in name for name in gradients) == 2
    for name, gradient in gradients.items():
        assert relative_error(fused_gradients[name], gradient) < 1e-5, name


def test_every_module_that_holds_weights_of_the_head_runs_through_its_own_call(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "why_not_fused", lambda *_: None)  # the hooks stand for those of ZeRO-3, not a user's
    _, trainer = pair(tmp_path, lora("lm_head"))
    head = trainer.model.get_base_model().lm_head
    entered = []
    for name in ("base_layer", "lora_A.default", "lora_B.default"):  # where ZeRO-3 gathers its shards
        head.get_submodule(name).register_forward_hook(lambda *_, name=name: entered.append(name))
    loss_and_gradients(trainer, make_inputs())
    assert sorted(entered) == ["base_layer", "lora_A.default", "lora_B.default"]


def test_a_run_with_lora_on_the_head_trains_and_takes_the_base_model_as_reference(tmp_path):
    options = {"max_steps": 2, "beta": 0.1, "num_iterations": 2, "use_liger_loss": True}
    trainer = make_trainer(tmp_path, peft_config=lora("lm_head"), **options)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    kls = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[1] > 1e-6


def test_a_float32_head_with_lora_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True does not go with"):
        make_trainer(tmp_path, peft_config=lora("lm_head"), cast_lm_head_to_fp32=True)


def test_an_adapter_on_the_head_and_a_hook_that_sees_logits_exclude_each_other(tmp_path):
    from trl_fused_grpo._compat.trl import REFUSES_ADAPTER_ON_HEAD

    if not REFUSES_ADAPTER_ON_HEAD:
        pytest.skip("TRL's own log-probs have the adapter's term")
    trainer = make_trainer(tmp_path, peft_config=lora("lm_head"))
    seen = []
    trainer.model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    with pytest.raises(ValueError, match=r"because a hook on .* leaves out the adapter on the output projection"):
        loss_and_gradients(trainer, make_inputs())
    assert not seen


def test_without_the_flag_trl_decides_about_adapters_on_the_head(tmp_path):
    from trl_fused_grpo._compat.trl import TRL

    if TRL.release < (1, 15):
        pytest.skip("this TRL takes them")
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head`"):
        make_trainer(tmp_path, peft_config=lora("lm_head"), use_liger_loss=False)


def test_a_trained_copy_of_the_head_trains_in_the_trainer(tmp_path):
    config = lora("q_proj", modules_to_save=["lm_head"])
    (loss, gradients), (fused_loss, fused_gradients) = [
        loss_and_gradients(t, make_inputs()) for t in pair(tmp_path, config)
    ]
    assert relative_error(fused_loss, loss) < 1e-5
    assert any("lm_head.modules_to_save" in name for name in gradients)
    assert gradients.keys() == fused_gradients.keys()
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())


PROMPTS = {
    "prompt-tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix-tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_learning_trains_in_the_trainer(tmp_path, name):
    trainers = pair(tmp_path, PROMPTS[name])
    (loss, gradients), (fused_loss, fused_gradients) = [loss_and_gradients(t, make_inputs()) for t in trainers]
    assert relative_error(fused_loss, loss) < 1e-5
    assert gradients.keys() == fused_gradients.keys() != set()
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())


def test_a_vocabulary_larger_than_the_tokenizers_is_projected_whole(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.resize_token_embeddings(VOCAB_SIZE + 61, mean_resizing=False)
    inputs = make_inputs()
    loss, gradients = loss_and_gradients(trainer, inputs)
    assert math.isfinite(loss)
    assert gradients["lm_head.weight"][VOCAB_SIZE:].abs().sum() > 0


def _scaled(**options):
    config = model_config("llama")
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": 0.0625}, 0.0625),
        ({"logit_scale": 0.0}, 0.0),
        ({"logit_scale": None}, 1.0),
        ({"output_multiplier": 3.0}, 3.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logits_scaling": 8.0}, 0.125),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
    ],
)
def test_the_scale_of_the_logits_has_many_names(options, scale):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    for name, value in options.items():
        setattr(model.config, name, value)
    assert read_lm_head(model).logit_scale == scale


def test_a_final_softcap_is_read():
    model = AutoModelForCausalLM.from_config(_scaled(final_logit_softcapping=30.0))
    assert read_lm_head(model).softcap == 30.0


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored in 8 bits."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight * self.scale).to(x.dtype).T


def test_a_quantized_base_model_trains_with_a_normal_head(tmp_path):
    results = []
    for trainer in pair(tmp_path, lora("q_proj", "v_proj")):
        for layer in trainer.model.get_base_model().model.layers:
            layer.mlp.down_proj = QuantizedLinear(layer.mlp.down_proj)
        results.append(loss_and_gradients(trainer, make_inputs()))
    (loss, gradients), (fused_loss, fused_gradients) = results
    assert relative_error(fused_loss, loss) < 1e-5
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())


def test_a_quantized_head_is_refused():
    model = AutoModelForCausalLM.from_config(model_config("llama"))
    model.lm_head = QuantizedLinear(model.lm_head)
    with pytest.raises(ValueError, match="no floating-point weight"):
        output_projection(model)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "layer"),
    [("roberta", "lm_head.dense"), ("bert", "cls.predictions.transform.dense"), ("bert-generation", None)],
)
def test_layers_between_hidden_states_and_head_are_found(family, layer):
    config = AutoConfig.for_model(family, vocab_size=64, is_decoder=True, **SMALL)
    assert layer_before_head(AutoModelForCausalLM.from_config(config)) == layer


def test_a_layer_that_the_user_puts_before_the_head_later_is_found():
    model = tiny_model("llama")
    assert layer_before_head(model) is None
    model.lm_head = nn.ModuleDict({"dense": nn.Linear(8, 8), "decoder": model.lm_head})
    model.get_output_embeddings = lambda: model.lm_head["decoder"]
    assert layer_before_head(model) == "lm_head.dense"


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3-vl"])
def test_a_head_that_follows_the_hidden_states_has_no_layer_before_it(kind):
    assert layer_before_head(tiny_model(kind)) is None


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", ["forecast", "recompute"])
def test_low_rank_terms_on_a_gpu(backward, dtype):
    problem = LowRankProblem(dtype=dtype, device="cuda")
    values, stats = problem.fused(backward, KnownGradients(problem.grads) if backward == "forecast" else None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    errors = [relative_error(value, truth) for value, truth in zip(values, problem.truth(), strict=True)]
    assert max(errors) <= tolerance, errors
    assert stats.recomputed == (0 if backward == "forecast" else N)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("old_logps", [False, True], ids=["on-policy", "off-policy"])
def test_the_head_may_be_on_another_device(tmp_path, old_logps):
    results = []
    for device in ("cuda", "cpu"):
        trainer = make_trainer(tmp_path, use_cpu=False, beta=0.1)
        trainer.model.lm_head.to(device)
        inputs = make_inputs(ref_per_token_logps=-8.0 * torch.ones(4, 8))
        if old_logps:
            inputs["old_per_token_logps"] = -9.0 * torch.ones(4, 8)
        inputs = {name: value.cuda() for name, value in inputs.items()}
        results.append(loss_and_gradients(trainer, inputs))
        assert (trainer.fused_stats.backward, trainer.fused_stats.recomputed) == ("forecast", 0)
    (loss, gradients), (other_loss, other_gradients) = results
    assert relative_error(other_loss, loss) < 1e-5
    assert all(relative_error(other_gradients[name].cuda(), grad) < 1e-5 for name, grad in gradients.items())
