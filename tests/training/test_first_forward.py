"""The first forward of an accumulation window takes the memory of the gradients that are not there yet."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.gptj import modeling_gptj
from trl import GRPOTrainer

from tests.code_of import as_code_of
from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.training import engine, memory
from trl_fused_grpo.training.memory import GradientMemory, gradient_memory, why_not_in_memory_of_gradients


# Its attention is outside transformers' interface, or eager, by the version; from 5.24 on it is as others'
GPTJ_REASON = None if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS") else "rows of their own|each pair of tokens"
WINDOW = {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}


def begun(folder, **options):
    """A trainer whose layers checkpoint, as in its training."""
    trainer = make_trainer(folder, **{**WINDOW, **options})
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def memory_of(trainer, compiled=False):
    return gradient_memory(trainer, trainer._fused.engine.causal_lm(trainer.model), compiled)


def limits_of(trainer, padded, has_images=False):
    return memory.token_limits(trainer._fused.engine, has_images, padded)


def test_more_tokens_fit_when_backward_begins_and_when_it_ends():
    gradients = GradientMemory(free=1000, inputs=6, working=4, working_of_trl=4)
    assert gradients.tokens(padded=100) == (200, 100)  # of 10 bytes each, when it begins
    # When it ends they need 100 bytes, as TRL's 10 tokens with their inputs
    assert gradients.tokens(padded=10) == (25, 10)
    assert replace(gradients, working_of_trl=6).tokens(padded=10) == (30, 12)  # of 120 bytes
    assert replace(gradients, casts_of_trl=50).tokens(padded=10) == (27, 11)  # of 110 bytes


def test_forwards_behind_the_first_have_the_memory_of_casts_that_only_trl_keeps():
    gradients = GradientMemory(free=1000, inputs=6, working=4, working_of_trl=4, casts_of_trl=200)
    assert gradients.tokens(padded=10) == (65, 26)  # of 260 bytes
    assert replace(gradients, casts=60).tokens(padded=10) == (65, 20)
    assert replace(gradients, casts=60, working_of_head=14).tokens(padded=10) == (65, 10)  # 20 bytes each


def test_a_token_takes_the_inputs_of_layers_and_what_the_widest_layer_computes(tmp_path):
    trainer = begun(tmp_path)
    config = trainer.model.config
    heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    ends = 2 * (hidden + heads[0]) + 2 * (hidden + heads[1]) + 3 * (hidden + inner)
    weights = 4 * sum(parameter.numel() for parameter in trainer.model.parameters())
    inputs, working = 4 * config.num_hidden_layers * hidden, int(memory._WITHOUT_CASTS * 4 * ends)
    plain = GradientMemory(weights, inputs, working, working, working_of_head=(6 * 4 + 48) * hidden)
    assert memory_of(trainer) == plain
    head, embedding = trainer.model.lm_head.weight.nbytes, trainer.model.model.embed_tokens.weight.nbytes
    with mock.patch.object(trainer.accelerator.state, "_mixed_precision", "bf16"):
        working, of_trl = (int(of_byte * 2 * ends) for of_byte in (memory._COMPILED, memory._OF_TRL))
        of_both = replace(plain, working=working, working_of_trl=of_trl)
        of_layers = weights - embedding - head
        expected = replace(of_both, casts_of_trl=(of_layers - head) // 2, casts=head // 2)
        assert memory_of(trainer, compiled=True) == expected
        assert memory_of(trainer).casts == of_layers // 2
        assert memory_of(trainer).working == memory_of(trainer).working_of_trl == int(memory._AS_IT_IS * 2 * ends)
        trainer.is_fsdp_enabled, is_fsdp = True, trainer.is_fsdp_enabled
        working = int(memory._WITHOUT_CASTS * 2 * ends)
        assert memory_of(trainer, compiled=True) == replace(plain, working=working, working_of_trl=working)
        trainer.is_fsdp_enabled = is_fsdp
        frozen = trainer.model.model.norm.weight.requires_grad_(False)
        working = int(memory._AS_IT_IS * 2 * ends)
        expected = replace(plain, free=weights - frozen.nbytes, working=working, working_of_trl=working)
        assert memory_of(trainer, compiled=True) == expected  # as with adapters


def test_only_gradients_that_will_come_count(tmp_path):
    trainer = begun(tmp_path, kind="qwen2.5-vl")
    text, vision = trainer.model.model.language_model, trainer.model.model.visual
    weights = {*text.parameters(), *trainer.model.lm_head.parameters()}
    assert memory_of(trainer).free == sum(weight.nbytes for weight in weights)
    assert not weights & set(vision.parameters())
    text.layers[0].mlp.requires_grad_(False)
    frozen = {*text.layers[0].mlp.parameters()}
    assert memory_of(trainer).free == sum(weight.nbytes for weight in weights - frozen)


def test_the_first_forward_gets_more_tokens_up_to_a_limit(tmp_path):
    trainer = begun(tmp_path)
    (first, _), most = memory_of(trainer).tokens(1000), memory.MOST_TOKENS
    assert first > 1050
    assert limits_of(trainer, 1000) == (first, 1000)
    assert limits_of(trainer, most - 1) == (most, most - 1)
    assert limits_of(trainer, 10 * most) == (most, most)
    assert limits_of(trainer, 1000, has_images=True) == (1000, 1000)
    not_checkpointed = begun(tmp_path, fused_memory=None, gradient_checkpointing=False)
    assert limits_of(not_checkpointed, 1000) == (1000, 1000)
    assert limits_of(not_checkpointed, 10 * most) == (most, most)


def test_small_micro_batches_share_forwards_behind_the_first_where_layers_are_compiled(tmp_path):
    config = Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=12, head_dim=32)
    limits = []
    for fused_compile in (True, False):
        trainer = begun(tmp_path, model=Qwen3ForCausalLM(config), fused_compile=fused_compile)
        with mock.patch.object(trainer.accelerator.state, "_mixed_precision", "bf16"):
            limits.append(limits_of(trainer, 20))
    (_, of_compiled), (_, of_others) = limits
    assert of_compiled > 40
    assert of_others == 20


def test_weights_of_any_size_do_not_lift_the_limit(tmp_path, monkeypatch):
    trainer = begun(tmp_path)
    monkeypatch.setattr(memory, "gradient_memory", lambda *_: GradientMemory(2**50, 2**20, 1))
    assert limits_of(trainer, 50) == (memory.MOST_TOKENS, 50)


def test_a_limit_of_the_user_s_holds_for_all(tmp_path):
    assert limits_of(begun(tmp_path, fused_max_tokens_per_forward=70), 50) == (70, 70)


def test_gradients_and_layers_that_do_not_checkpoint_are_seen(tmp_path):
    trainer = begun(tmp_path)
    assert memory.why_memory_is_taken(trainer, trainer.model) is None
    *_, last = trainer.model.parameters()
    last.grad = torch.zeros_like(last)
    assert "gradients" in memory.why_memory_is_taken(trainer, trainer.model)
    last.grad = None
    trainer.model.model.layers[0].gradient_checkpointing = False
    assert "checkpoint" in memory.why_memory_is_taken(trainer, trainer.model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, None),
        ({"gradient_accumulation_steps": 1}, "no micro-batch that finds gradients"),
        ({"gradient_checkpointing": False}, "do not checkpoint"),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}},
            "do not checkpoint",
        ),
        ({"kind": "lfm2"}, "rows of their own"),
        ({"kind": "gptj"}, GPTJ_REASON),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, "each pair of tokens"),
    ],
)
def test_the_memory_is_left_where_what_is_assumed_of_it_does_not_hold(tmp_path, options, reason):
    trainer = begun(tmp_path, **options)
    found = why_not_in_memory_of_gradients(trainer, trainer.model)
    assert found is None if reason is None else re.search(reason, found)
    assert (memory_of(trainer) == GradientMemory()) == (reason is not None)


def test_matrices_that_are_shards_or_none_are_not_counted_on(tmp_path):
    trainer = begun(tmp_path)
    for layer in trainer.model.model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(parameter.detach().flatten()))
    assert "not known" in why_not_in_memory_of_gradients(trainer, trainer.model)


def test_matrices_that_are_buffers_are_not_known(tmp_path):
    """As those of quantized layers."""
    trainer = begun(tmp_path)
    trainer.model.model.layers[1].mlp.register_buffer("quantized", torch.zeros(8, 8))
    trainer.model.model.layers[1].mlp.act_fn = nn.SiLU()  # what is known of a model is found out anew
    assert "not known" in why_not_in_memory_of_gradients(trainer, trainer.model)


@pytest.mark.parametrize("is_view", [True, False])
def test_gradients_that_stay_in_ddp_s_buckets_free_nothing(tmp_path, monkeypatch, is_view):
    trainer = begun(tmp_path)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.gradient_as_bucket_view = is_view
    trainer.model_wrapped = wrapped
    reason = why_not_in_memory_of_gradients(trainer, trainer.model)
    assert reason == ("gradients stay where DDP reduces them" if is_view else None)


def test_deepspeed_keeps_its_own(tmp_path):
    trainer = begun(tmp_path)
    trainer.is_deepspeed_enabled = True
    assert "DeepSpeed" in why_not_in_memory_of_gradients(trainer, trainer.model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "keeps_gradients", "forwards"),
    [
        ({}, False, [16, 16]),  # both windows of 4 micro-batches of 4 sequences
        ({"num_iterations": 2}, False, [16, 16]),
        ({"steps_per_generation": 8}, False, [16, 16]),
        ({"steps_per_generation": 2}, False, None),
        ({"steps_per_generation": 2, "num_iterations": 2}, False, None),  # half of a window, and again
        ({}, True, None),  # the second window finds gradients, of zeros
        ({"steps_per_generation": 8}, True, None),
    ],
    ids=[
        "a-window-a-generation",
        "two-iterations",
        "two-windows-a-generation",
        "half-a-window",
        "half-a-window-twice",
        "zeroed-gradients",
        "zeroed-gradients-within-a-generation",
    ],
)
def test_a_window_of_one_forward_trains_what_stock_trains(
    tmp_path, monkeypatch, caplog, options, keeps_gradients, forwards
):
    monkeypatch.setattr(memory, "_WITHOUT_CASTS", 0.05)  # as if the tiny model had 60 layers
    seen, beside_gradients, begins, made = [], [], [], []

    def trained(cls):
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "beta": 0.1, **WINDOW, **options}
        trainer = make_trainer(tmp_path, cls, **settings)
        use_sampler(trainer)
        made.append(trainer)
        if keeps_gradients:
            zero_grad = trainer.model.zero_grad
            trainer.model.zero_grad = as_code_of(
                "torch.nn.modules.module", lambda set_to_none=True: zero_grad(set_to_none=False)
            )
        trainer.train()
        logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        return logs, [parameter.detach() for parameter in trainer.model.parameters()]

    original = engine.compute_logps

    def compute_logps(request, options, call, images):
        if torch.is_grad_enabled():
            seen.append(len(call.input_ids))
            begins.append(made[0]._fused.window.begins)  # FSDP2 holds gradients where no weight shows them
            if any(parameter.grad is not None for parameter in call.model.parameters()):
                padded = request.micro_batch * call.input_ids.shape[1] if request.micro_batch else 10_000
                beside_gradients.append(
                    made[0]._fused.engine.tokens_of_forward(call, made[0]._fused.ladder.findings) <= padded
                )
        return original(request, options, call, images)

    monkeypatch.setattr(engine, "compute_logps", compute_logps)
    found = trained(FusedGRPOTrainer)
    assert sum(seen) == 32 and max(seen) > 4
    assert forwards is None or seen == forwards
    if keeps_gradients:
        assert seen[0] == 16 and max(seen[1:]) < 16
        assert caplog.text.count("because weights still have gradients when a window begins") == 1
    assert begins[0] and sum(begins) == 2
    assert all(beside_gradients)
    assert beside_gradients or forwards
    expected = trained(GRPOTrainer)
    assert found[0] == [pytest.approx(pair, rel=1e-4, abs=1e-6) for pair in expected[0]]
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_the_metrics_of_such_a_window_are_stock_s(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_WITHOUT_CASTS", 0.05)

    def trained(cls):
        trainer = make_trainer(tmp_path, cls, max_steps=1, **WINDOW)
        use_sampler(trainer)
        trainer.train()
        return trainer

    ours, stock = trained(FusedGRPOTrainer), trained(GRPOTrainer)
    timed = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    [mine, *_], [theirs, *_] = ours.state.log_history, stock.state.log_history
    shared = theirs.keys() - timed
    assert shared <= mine.keys() and "entropy" in shared
    assert {name: mine[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared}, rel=1e-4)
    assert trl_compat.metrics_of(ours).keys() >= trl_compat.metrics_of(stock).keys()
