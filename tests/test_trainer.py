"""FusedGRPOTrainer in training: the stock objective and metrics without logits, and detach()."""

import copy
import functools
import inspect
import types
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

import trl_fused_grpo
from trl_fused_grpo import FusedGRPOTrainer, FusedRLOOTrainer, fuse
from trl_fused_grpo._compat.models import is_transformers_own
from trl_fused_grpo.modeling.attention.packed import uninstall_attention
from trl_fused_grpo.modeling.head.fused_forward import install_fused_forward
from trl_fused_grpo.modeling.layers.forward_override import restore_forward
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, tiny_model
from trl_fused_grpo.training import engine, state
from trl_fused_grpo.training.findings import Level, replaced_around_head
from trl_fused_grpo.training.requests import build_loss_request

from .oracle import relative_error
from .tiny_training import dense_log_probs, loss_and_gradients, make_inputs, make_trainer


def history(trainer):
    """What was logged, without times."""
    return [
        {k: v for k, v in entry.items() if "time" not in k and "per_second" not in k and "runtime" not in k}
        for entry in trainer.state.log_history
    ]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("cls", [FusedGRPOTrainer, fuse(type("Mine", (GRPOTrainer,), {}))], ids=["class", "fuse"])
@pytest.mark.parametrize(
    ("said", "is_on"), [({}, True), ({"use_liger_loss": None}, True), (False, False), (True, True)]
)
def test_whoever_takes_the_class_has_its_loss_unless_they_say_not(tmp_path, caplog, cls, said, is_on):
    said = said if isinstance(said, dict) else {"use_liger_loss": said}
    for _ in range(2):
        trainer = make_trainer(tmp_path, cls, config=GRPOConfig, max_steps=1, **said)
    trainer.train()
    assert any("fused/rows_recomputed" in entry for entry in trainer.state.log_history) is is_on
    off = [
        message for message in caplog.messages if "trains with TRL's own loss, because use_liger_loss=False" in message
    ]
    assert len(off) == (not is_on) and all(message.startswith(cls.__name__) for message in off)


def test_the_signature_is_trls():
    for fused, stock in ((FusedGRPOTrainer, GRPOTrainer), (FusedRLOOTrainer, RLOOTrainer)):
        assert inspect.signature(fused) == inspect.signature(stock.__init__).replace(
            parameters=[*inspect.signature(stock.__init__).parameters.values()][1:]
        )

    class Mine(FusedGRPOTrainer):
        def __init__(self, own, **kwargs):
            super().__init__(**kwargs)

    assert list(inspect.signature(Mine).parameters) == ["own", "kwargs"]


def test_the_package_names_what_is_public():
    names = {name for name in trl_fused_grpo.__all__ if hasattr(trl_fused_grpo, name)}
    assert names == {*trl_fused_grpo.__all__} >= {"FusedGRPOTrainer", "FusedGRPOConfig", "fuse", "patch"}


def test_without_the_flag_training_is_stock_bit_for_bit(tmp_path):
    runs = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = make_trainer(
            tmp_path, cls, max_steps=2, beta=0.1, **({} if cls is GRPOTrainer else {"use_liger_loss": False})
        )
        trainer.train()
        runs.append((weights(trainer), history(trainer)))
    (stock_weights, stock_log), (fused_weights, fused_log) = runs
    assert all(torch.equal(stock_weights[name], fused_weights[name]) for name in stock_weights)
    assert stock_log == fused_log


def test_training_with_the_flag_follows_stock_and_logs_every_metric_of_it(tmp_path):
    options = {
        "max_steps": 4,
        "beta": 0.1,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    stock = make_trainer(tmp_path, GRPOTrainer, **options)
    stock.train()
    fused = make_trainer(tmp_path, **options)  # seeds the sampler anew
    fused.train()
    after = weights(fused)
    for name, weight in weights(stock).items():
        assert relative_error(after[name], weight) < 1e-5, name
    for stock_entry, entry in zip(history(stock), history(fused), strict=True):
        assert stock_entry.keys() == entry.keys() - {"fused/rows_recomputed"}
        for name in stock_entry:
            assert entry[name] == pytest.approx(stock_entry[name], rel=1e-3, abs=1e-5), name
    assert [entry["fused/rows_recomputed"] for entry in fused.state.log_history if "grad_norm" in entry] == [0.0] * 4


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation put out."""

    __module__ = "torch"  # a library's: else TRL's own method would run, to be seen by it
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("old_logps", [False, True], ids=["on-policy", "off-policy"])
def test_no_forward_materialises_the_logits_of_a_batch(tmp_path, old_logps):
    trainer = make_trainer(tmp_path, fused_logits_mib=0.01)
    inputs = make_inputs(rows=16, length=24)
    logits = inputs["completion_ids"].numel() * VOCAB_SIZE
    if old_logps:
        inputs["old_per_token_logps"] = -7 * torch.ones(16, 24)
    with LargestTensor() as largest:
        loss_and_gradients(trainer, inputs)
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 24, batch_size=8)
    assert trainer._fused.ladder.level > Level.STOCK
    assert largest.numel < logits / 4


def test_tool_results_are_not_projected(tmp_path):
    trainer = make_trainer(tmp_path)
    inputs = make_inputs()
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1] = 0
    trainer.tools = [print]
    loss_and_gradients(trainer, inputs)
    assert trainer.fused_stats.rows == (inputs["completion_mask"] * inputs["tool_mask"]).sum()


class Reinforce(FusedGRPOTrainer):
    """An objective of the user's, which reads tool results too and adds the square of the entropy."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps, entropies, *_ = self._get_per_token_logps_and_entropies(
            model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
        )
        terms = -inputs["advantages"].unsqueeze(1) * logps * logps.detach().exp() + 0.01 * entropies**2
        return (terms * inputs["completion_mask"]).sum()


def test_a_subclass_with_its_own_objective_trains_that_objective(tmp_path):
    trainer = make_trainer(tmp_path, Reinforce)
    inputs = make_inputs()
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1] = 0
    loss, gradients = loss_and_gradients(trainer, inputs)

    stock = make_trainer(tmp_path, GRPOTrainer)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    stock_entropies = stock._get_per_token_logps_and_entropies(stock.model, ids, mask, 8, compute_entropy=True)[1]

    model = trainer.model.double()
    model.zero_grad()
    logps, log_p = dense_log_probs(model, inputs)
    entropies = -(log_p.exp() * log_p).sum(-1)
    entropies = entropies if stock_entropies.requires_grad else entropies.detach()  # as TRL's own are, by the version
    terms = -inputs["advantages"].unsqueeze(1) * logps * logps.detach().exp() + 0.01 * entropies**2
    truth = (terms * inputs["completion_mask"]).sum()
    truth.backward()
    assert relative_error(loss, truth.detach()) < 1e-5
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name


class _Fixed:
    """A forecast of gradients that nobody sends."""

    def __init__(self, needs_grad, values):
        self.needs_grad, self.values = needs_grad, values

    def at(self, index, grad_rows):
        picked = self.values.flatten()[index]

        def forecast(rows, logps, entropies):
            return picked[rows], None

        forecast.grad_rows = grad_rows
        return forecast


def test_a_wrong_forecast_trains_the_same_and_is_reported(tmp_path, monkeypatch):
    inputs = make_inputs(old_per_token_logps=-6.9 * torch.ones(4, 8))
    _, right = loss_and_gradients(make_trainer(tmp_path), inputs)

    def build_wrong_request(*args):
        logps_request = build_loss_request(*args)
        wrong = torch.linspace(-1, 2, logps_request.mask.numel()).view(logps_request.mask.shape)
        return replace(logps_request, forecast=_Fixed(logps_request.forecast.needs_grad, wrong))

    monkeypatch.setattr(state, "build_loss_request", build_wrong_request)
    trainer = make_trainer(tmp_path)
    _, gradients = loss_and_gradients(trainer, inputs)
    assert trainer.fused_stats.recomputed > 0
    assert all(relative_error(gradients[name], right[name]) < 1e-5 for name in right)


def test_forcing_the_recompute_backward_gives_the_same_gradients(tmp_path):
    inputs = make_inputs()
    _, expected = loss_and_gradients(make_trainer(tmp_path), inputs)
    trainer = make_trainer(tmp_path, fused_backward="recompute")
    _, gradients = loss_and_gradients(trainer, inputs)
    assert trainer.fused_stats.backward == "recompute"
    assert all(relative_error(gradients[name], expected[name]) < 1e-5 for name in expected)


def test_generation_is_unchanged_by_the_fused_forward(tmp_path):
    stock, fused = make_trainer(tmp_path, GRPOTrainer), make_trainer(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    outputs = [
        t.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        for t in (stock, fused)
    ]
    assert torch.equal(*outputs)


def test_a_checkpoint_written_in_training_loads_and_continues(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    resumed = make_trainer(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    arguments = torch.load(tmp_path / "out" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert arguments.use_liger_loss is True


def test_bfloat16_autocast_trains_close_to_stock(tmp_path):
    inputs = make_inputs(rows=8)
    gradients = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        trainer = make_trainer(tmp_path, cls, bf16=True)
        trainer.model = trainer.accelerator.prepare_model(trainer.model)
        gradients.append(loss_and_gradients(trainer, inputs)[1])
    stock, fused = gradients
    assert all(relative_error(fused[name], stock[name]) < 0.05 for name in stock)


def takes_fused(model):
    return hasattr(model.forward, "_override")


@pytest.mark.parametrize("trained", [False, True], ids=["constructed", "trained"])
def test_detach_gives_the_models_and_attention_back(tmp_path, monkeypatch, trained):
    replaced = {}

    def remembering(causal_lm):
        replaced.setdefault(causal_lm, vars(causal_lm).get("forward"))  # newer TRL has put one there
        return install_fused_forward(causal_lm)

    monkeypatch.setattr(engine, "install_fused_forward", remembering)
    uninstall_attention()  # what other tests have left
    functions = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert all(map(is_transformers_own, functions))
    trainer = make_trainer(tmp_path, beta=0.1, max_steps=1)
    assert takes_fused(trainer.model) and takes_fused(trainer.ref_model)
    if trained:
        trainer.train()
    for _ in range(2):
        trainer.detach()
        assert not takes_fused(trainer.model) and not takes_fused(trainer.ref_model)
        assert [vars(model).get("forward") for model in (trainer.model, trainer.ref_model)] == list(replaced.values())
        assert (ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]) == functions


def test_detach_gives_back_a_forward_of_the_users():
    model = tiny_model("llama")
    calls = []

    def forward(self, *args, **kwargs):
        calls.append(self)
        return type(self).forward(self, *args, **kwargs)

    model.forward = own = types.MethodType(forward, model)
    install_fused_forward(model)
    # It is found under the fused forward
    assert replaced_around_head(model, model) == f"the forward of {type(model).__name__}"
    model(input_ids=torch.tensor([[5, 6]]))
    restore_forward(model)
    restore_forward(model)
    assert vars(model)["forward"] == own and calls == [model]


def test_a_detached_trainer_trains_what_it_would_have_trained(tmp_path):
    runs = []
    for detaches in (False, True):
        trainer = make_trainer(tmp_path, max_steps=2)
        if detaches:
            trainer.detach()
        trainer.train()
        assert takes_fused(trainer.model)
        runs.append(weights(trainer))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_detach_leaves_the_fused_forward_in_a_wrapper_that_came_later():
    model = tiny_model("llama")
    install_fused_forward(model)
    fused = model.forward
    model.forward = wrapper = functools.wraps(fused)(lambda *args, **kwargs: fused(*args, **kwargs))
    restore_forward(model)
    assert vars(model)["forward"] is wrapper
    install_fused_forward(model)
    assert vars(model)["forward"] is wrapper and takes_fused(model)


def test_a_deep_copy_of_a_prepared_model_runs_its_own_weights():
    model = tiny_model("llama")
    install_fused_forward(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(input_ids=torch.tensor([[5, 6]])).logits.any()
        assert model(input_ids=torch.tensor([[5, 6]])).logits.any()
