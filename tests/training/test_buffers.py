"""Models whose forwards change their buffers train as in stock: each micro-batch has the forward that it has there."""

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, spectral_norm
from trl import GRPOTrainer

from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.parity.tiny import tiny_model
from trl_fused_grpo.training.buffers import Buffers


HIDDEN = tiny_model("llama").config.hidden_size


class Around(nn.Module):
    """Does something to what an MLP returns."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp


class Counting(Around):
    """Grows with the number of forwards in training."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        self.number += float(self.training)
        return self.mlp(x) * (1.0 + 0.01 * self.number)


class Mean(Around):
    """Takes off the mean of what it has seen in forwards with gradient."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x):
        out = self.mlp(x)
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * out.detach().flatten(0, -2).mean(0)
        return out - self.mean


class Normalising(Around):
    """Keeps running statistics."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x):
        out = self.mlp(x)
        return self.norm(out.flatten(0, -2)).view_as(out)


class Table(Around):
    """Fills a table of as many places as it has seen, as remote code does with the cosines of its positions."""

    def forward(self, x):
        if getattr(self, "places", torch.empty(0)).numel() < x.shape[-2]:
            self.register_buffer("places", torch.ones(x.shape[-2]), persistent=False)
        return self.mlp(x) * self.places[: x.shape[-2], None]


def in_mlp(kind):
    def change(layer):
        layer.mlp = kind(layer.mlp)

    return change


def observe(layer):
    """As in quantization-aware training: its scale follows the largest number that it has seen."""
    observer = quantization.MovingAverageMinMaxObserver
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj, quantization.FakeQuantize.with_args(observer=observer)())


CHANGES = {
    "observer": observe,
    "counter": in_mlp(Counting),
    "mean": in_mlp(Mean),
    "batch norm": in_mlp(Normalising),
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer.self_attn.q_proj),
    "spectral norm, a hook": lambda layer: spectral_norm(layer.self_attn.q_proj),
}


def train(tmp_path, cls, change, **options):
    torch.manual_seed(0)
    model = tiny_model("llama")
    change(model.model.layers[0])
    options = {"max_steps": 3, "gradient_accumulation_steps": 3, "optim": "sgd", "learning_rate": 0.1, **options}
    trainer = make_trainer(tmp_path, cls, model=model, **options)
    trainer.train()
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return tensors, [entry for entry in trainer.state.log_history if "grad_norm" in entry], trainer


def assert_equal(trained, stock):
    for name, value in stock[0].items():
        assert relative_error(trained[0][name].float(), value.float()) < 1e-5, name
    for entry, stock_entry in zip(trained[1], stock[1], strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert entry[name] == pytest.approx(stock_entry[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_its_buffers_in_each_forward_trains_as_in_stock(tmp_path, name):
    stock = train(tmp_path, GRPOTrainer, CHANGES[name])
    fused = train(tmp_path, FusedGRPOTrainer, CHANGES[name])
    assert_equal(fused, stock)
    assert fused[2].fused_layout() == "padded"


def test_a_table_that_is_filled_once_does_not_keep_the_padding(tmp_path):
    stock = train(tmp_path, GRPOTrainer, in_mlp(Table))
    fused = train(tmp_path, FusedGRPOTrainer, in_mlp(Table))
    assert_equal(fused, stock)
    assert fused[2].fused_layout() == "packed"


def test_buffers_are_given_back_as_they_were():
    module = nn.Module()
    module.register_buffer("written", torch.zeros(2))
    module.register_buffer("replaced", torch.zeros(2))
    module.register_buffer("none", None)
    buffers, written = Buffers([module]), module.written
    assert buffers.changed() is None
    module.written += 1.0
    module.replaced = torch.ones(2)
    module.register_buffer("new", torch.ones(2))
    assert buffers.changed() == "Module"
    buffers.restore()
    assert module.written is written
    assert not module.written.any()
    assert not module.replaced.any()
    assert [*module._buffers] == ["written", "replaced", "none"]
