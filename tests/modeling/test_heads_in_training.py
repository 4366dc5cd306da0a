"""Every kind of head in the trainer: adapters, trained copies, prompts, quantized bases, a head on another device."""

import math
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.code_of import as_code_of
from tests.modeling.heads import QuantizedLinear, lora
from tests.oracle import relative_error
from tests.tiny_training import loss_and_gradients, make_inputs, make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.modeling.head import fused_forward
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, model_config


peft = pytest.importorskip("peft")


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


def test_every_module_that_holds_weights_of_the_head_runs_through_its_own_call(tmp_path):
    _, trainer = pair(tmp_path, lora("lm_head"))
    head = trainer.model.get_base_model().lm_head
    entered = []
    for name in ("base_layer", "lora_A.default", "lora_B.default"):  # where ZeRO-3 gathers its shards
        hook = as_code_of("deepspeed", lambda *_, name=name: entered.append(name))
        head.get_submodule(name).register_forward_hook(hook)
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


def test_a_quantized_base_model_trains_with_a_normal_head(tmp_path):
    results = []
    for trainer in pair(tmp_path, lora("q_proj", "v_proj")):
        for layer in trainer.model.get_base_model().model.layers:
            layer.mlp.down_proj = QuantizedLinear(layer.mlp.down_proj)
        results.append(loss_and_gradients(trainer, make_inputs()))
    (loss, gradients), (fused_loss, fused_gradients) = results
    assert relative_error(fused_loss, loss) < 1e-5
    assert all(relative_error(fused_gradients[name], gradient) < 1e-5 for name, gradient in gradients.items())


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
        # A forecast is on the device of the batch
        assert trainer.fused_stats.backward == ("forecast" if device == "cuda" else "recompute")
    (loss, gradients), (other_loss, other_gradients) = results
    assert relative_error(other_loss, loss) < 1e-5
    assert all(relative_error(other_gradients[name].cuda(), grad) < 1e-5 for name, grad in gradients.items())


def test_another_thread_gets_logits_while_the_head_computes_log_probs(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    model, ids = trainer.model, torch.arange(5, 15)[None]
    seen, threads = [], []
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    compute = fused_forward.fused_linear_logps

    def infer():
        with torch.no_grad():
            seen.append(model(input_ids=ids).logits)

    def compute_beside(*args, **kwargs):
        if not threads:
            threads.append(Thread(target=infer))
            threads[0].start()
            threads[0].join()
        return compute(*args, **kwargs)

    monkeypatch.setattr(fused_forward, "fused_linear_logps", compute_beside)
    loss_and_gradients(trainer, make_inputs())
    (logits,) = seen
    torch.testing.assert_close(logits, expected)
