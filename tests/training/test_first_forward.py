"""The first forward of an accumulation window takes the memory of the gradients that are not there yet."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from tests.tiny_training import make_trainer
from tests.training.sampler import use_sampler
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat import trl as trl_compat
from trl_fused_grpo.training import first_forward, memory
from trl_fused_grpo.training.first_forward import GradientMemory, gradient_memory, why_not_in_memory_of_gradients


WINDOW = {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}


def begun(folder, **options):
    """A trainer whose layers checkpoint, as in its training."""
    trainer = make_trainer(folder, **{**WINDOW, **options})
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def memory_of(trainer, layout="packed"):
    return gradient_memory(trainer, trainer._fused.engine.causal_lm(trainer.model), layout)


def limits_of(trainer, padded, layout="packed"):
    return memory.token_limits(trainer._fused.engine, layout)(padded)


def test_what_tokens_leave_of_the_memory_goes_to_attention():
    gradients = GradientMemory(free=1000, bytes_of_token=10)
    assert gradients.tokens == 100
    assert [gradients.beside(tokens, padded=50) for tokens in (20, 50, 80, 150, 151)] == [1000, 1000, 700, 0, 0]
    assert GradientMemory().tokens == GradientMemory().beside(7, 7) == 0


def test_a_token_takes_the_inputs_of_layers_and_what_the_widest_layer_computes(tmp_path):
    trainer = begun(tmp_path)
    config = trainer.model.config
    heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    ends = 2 * (hidden + heads[0]) + 2 * (hidden + heads[1]) + 3 * (hidden + inner)
    of_token = 4 * config.num_hidden_layers * hidden + int(first_forward._NUMBERS_OF_PRODUCTS * 4 * ends)
    weights = 4 * sum(parameter.numel() for parameter in trainer.model.parameters())
    assert memory_of(trainer) == GradientMemory(weights, of_token)


def test_only_gradients_that_are_missing_count(tmp_path):
    trainer = begun(tmp_path)
    before, (first, *others) = memory_of(trainer).free, trainer.model.parameters()
    first.grad = torch.zeros_like(first)
    assert memory_of(trainer).free == before - first.nbytes
    others[0].requires_grad_(False)
    assert memory_of(trainer).free == before - first.nbytes - others[0].nbytes


def test_the_first_forward_gets_more_tokens_up_to_a_limit(tmp_path):
    trainer = begun(tmp_path)
    more, most = memory_of(trainer).tokens, memory.MAX_TOKENS
    assert more > 50
    assert limits_of(trainer, 50) == (50 + more, 50)
    assert limits_of(trainer, most - 1) == (most - 1 + more, most - 1)
    assert limits_of(trainer, 10 * most) == (most + more, most)
    assert limits_of(trainer, 50, "aligned") == (50, 50)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert limits_of(trainer, 10 * most) == (most, most)


def test_weights_of_any_size_do_not_lift_the_limit(tmp_path, monkeypatch):
    trainer = begun(tmp_path)
    monkeypatch.setattr(memory, "gradient_memory", lambda *_: GradientMemory(2**50, 1))
    assert limits_of(trainer, 50) == (first_forward.MAX_TOKENS, 50)


def test_a_limit_of_the_user_s_holds_for_all(tmp_path):
    assert limits_of(begun(tmp_path, fused_max_tokens_per_forward=70), 50) == (70, 70)


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
        ({"kind": "gptj"}, "rows of their own"),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, "each pair of tokens"),
    ],
)
def test_the_memory_is_left_where_what_is_assumed_of_it_does_not_hold(tmp_path, options, reason):
    trainer = begun(tmp_path, **options)
    found = why_not_in_memory_of_gradients(trainer, trainer.model, "packed")
    assert found is None if reason is None else reason in found
    assert (memory_of(trainer) == GradientMemory()) == (reason is not None)
    assert "memory of gradients that are not there yet" in str(trainer.fused_summary()) or reason is not None


def test_layers_that_stopped_to_checkpoint_are_seen(tmp_path):
    trainer = begun(tmp_path)
    trainer.model.model.layers[0].gradient_checkpointing = False
    assert memory_of(trainer) == GradientMemory()


def test_matrices_that_are_shards_or_none_are_not_counted_on(tmp_path):
    trainer = begun(tmp_path)
    for layer in trainer.model.model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(parameter.detach().flatten()))
    assert "not known" in why_not_in_memory_of_gradients(trainer, trainer.model, "packed")


@pytest.mark.parametrize("is_view", [True, False])
def test_gradients_that_stay_in_ddp_s_buckets_free_nothing(tmp_path, monkeypatch, is_view):
    trainer = begun(tmp_path)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.gradient_as_bucket_view = is_view
    trainer.model_wrapped = wrapped
    reason = why_not_in_memory_of_gradients(trainer, trainer.model, "packed")
    assert reason == ("gradients stay where DDP reduces them" if is_view else None)


def test_deepspeed_keeps_its_own(tmp_path):
    trainer = begun(tmp_path)
    trainer.is_deepspeed_enabled = True
    assert "DeepSpeed" in why_not_in_memory_of_gradients(trainer, trainer.model, "packed")


@pytest.mark.parametrize(
    ("options", "keeps_gradients", "forwards"),
    [
        ({}, False, [16, 16]),  # both windows of 4 micro-batches of 4 sequences
        ({"num_iterations": 2}, False, [16, 16]),
        ({"steps_per_generation": 8}, False, [16, 16]),
        ({"steps_per_generation": 2}, False, None),
        ({}, True, None),  # the second window finds gradients, of zeros
    ],
    ids=["a-window-a-generation", "two-iterations", "two-windows-a-generation", "half-a-window", "zeroed-gradients"],
)
def test_a_window_of_one_forward_trains_what_stock_trains(tmp_path, monkeypatch, options, keeps_gradients, forwards):
    seen = []

    def trained(cls):
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "beta": 0.1, **WINDOW, **options}
        trainer = make_trainer(tmp_path, cls, **settings)
        use_sampler(trainer)
        if keeps_gradients:
            zero_grad = trainer.model.zero_grad
            trainer.model.zero_grad = lambda set_to_none=True: zero_grad(set_to_none=False)
        trainer.train()
        logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        return logs, [parameter.detach() for parameter in trainer.model.parameters()]

    from trl_fused_grpo.training import engine

    original = engine.compute_logps

    def compute_logps(request, options, call, images):
        if torch.is_grad_enabled():
            seen.append(len(call.input_ids))
        return original(request, options, call, images)

    monkeypatch.setattr(engine, "compute_logps", compute_logps)
    found = trained(FusedGRPOTrainer)
    assert sum(seen) == 32 and max(seen) > 4
    assert forwards is None or seen == forwards
    if keeps_gradients:
        assert seen[0] == 16 and max(seen[1:]) < 16
    expected = trained(GRPOTrainer)
    assert found[0] == [pytest.approx(pair, rel=1e-4, abs=1e-6) for pair in expected[0]]
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1024, 16, 32_000), (512, 24, 8_000)], ids=["wide", "deep"])
def test_peak_memory_is_at_most_stock_s(tmp_path, dtype, shape):
    """Whole windows at TRL's defaults, of weights that are most of the memory and of weights that are little of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocab = shape
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
    )
    generator = torch.Generator().manual_seed(0)
    lengths = [2000, *torch.randint(60, 900, (31,), generator=generator).tolist()]
    completions = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in lengths]

    def trained(cls):
        torch.manual_seed(0)
        options = {"num_generations": 8, "max_completion_length": 2000, "gradient_accumulation_steps": 8}
        trainer = make_trainer(
            tmp_path,
            cls,
            model=Qwen3ForCausalLM(config).to(getattr(torch, dtype)),
            use_cpu=False,
            bf16=True,
            gradient_checkpointing=True,
            max_steps=3,
            **options,
        )
        use_sampler(trainer)
        logps = [[-6.5] * n for n in lengths]
        ids = [[5, 6, 7, 8]] * 32
        trainer._generate_single_turn = lambda prompts, *_, **__: (ids, completions, logps, {})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        if cls is FusedGRPOTrainer:
            assert max(trainer._fused.merger._ends) == 7
            padded = 4 * (4 + 2000)
            assert sum(lengths) > padded
        return torch.cuda.max_memory_allocated() - before

    stock = trained(GRPOTrainer)
    memory.free_memory()
    assert trained(FusedGRPOTrainer) <= stock


def test_the_metrics_of_such_a_window_are_stock_s(tmp_path):
    def trained(cls):
        trainer = make_trainer(tmp_path, cls, max_steps=1, **WINDOW)
        use_sampler(trainer)
        trainer.train()
        return trainer

    ours, stock = trained(FusedGRPOTrainer), trained(GRPOTrainer)
    timed = SimpleNamespace(names={"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"})
    [mine, *_], [theirs, *_] = ours.state.log_history, stock.state.log_history
    shared = theirs.keys() - timed.names
    assert shared <= mine.keys() and "entropy" in shared
    assert {name: mine[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared}, rel=1e-4)
    assert trl_compat.metrics_of(ours).keys() >= trl_compat.metrics_of(stock).keys()
