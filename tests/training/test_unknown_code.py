"""
Trainings with code of the user's are stock's: modules that count their forwards, mix tokens, change gradients or leave
the mask out, heads, hooks that see every call, and options that are changed after TRL has read them.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, RecurrentGemmaConfig, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaModel
from trl import GRPOTrainer

from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo._compat.required import TRANSFORMERS
from trl_fused_grpo.parity.tiny import VOCAB_SIZE, save_checkpoint, tiny_model
from trl_fused_grpo.training.findings import Level

from .sampler import use_rollouts


HIDDEN = tiny_model("llama").config.hidden_size
OPTIONS = {"max_steps": 3, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}


def train(folder, cls, model=None, change=None, around=None, **options):
    """
    Train on rollouts of many lengths.

    Args:
        model: makes the model, by default a Llama.
        change: is called with the trainer before its training.
        around: a context of the training, by the model.
    """
    torch.manual_seed(0)
    model = tiny_model("llama") if model is None else model()
    trainer = make_trainer(folder, cls, model=model, **{**OPTIONS, "lr_scheduler_type": "constant", **options})
    use_rollouts(trainer)
    if change is not None:
        change(trainer)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        if around is not None:
            stack.enter_context(around(trainer.model))
        torch.manual_seed(1)
        trainer.train()
    trained = {**trainer.model.state_dict(), **dict(trainer.model.named_parameters())}
    moved = {name: trained[name].detach() - value for name, value in start.items()}
    moved |= {name: value for name, value in trained.items() if name not in start}  # buffers
    return trainer, moved, [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def assert_same_training(fused, stock):
    (trainer, moved, log), (_, expected, expected_log) = fused, stock
    weights = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    rounding = torch.finfo(torch.float32).eps * sum(p.square().sum() for p in weights) ** 0.5
    size = sum(change.double().square().sum() for change in expected.values()) ** 0.5
    difference = sum((moved[name].double() - change).square().sum() for name, change in expected.items()) ** 0.5
    assert size > 100 * rounding
    assert difference < 1e-5 * size + 3 * rounding
    for entry, expected_entry in zip(log, expected_log, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert entry[name] == pytest.approx(expected_entry[name], rel=1e-4, abs=1e-6), name


def compare(folder, level, model=None, change=None, around=None, fused=None, **options):
    """Train both, compare, and return both trainers."""
    stock = train(folder, GRPOTrainer, model, change, around, **options)
    outcome = train(folder, FusedGRPOTrainer, model, change, around, **options, **(fused or {}))
    assert_same_training(outcome, stock)
    assert outcome[0]._fused.ladder.level == level
    return outcome[0], stock[0]


# Modules


class Around(nn.Module):
    """Does something to what an MLP returns."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp


class Counting(Around):
    """Grows with the number of forwards in training, which a buffer counts."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        self.number += float(self.training)
        return self.mlp(x) * (1.0 + 0.01 * self.number)


class Warming(Around):
    """The same, counted in an attribute."""

    calls = 0

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        return min(1.0, 0.5 + self.calls / 20) * self.mlp(x)


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


class Shifted(Around):
    """Mixes neighbours behind a scale so small that one batch shows less of it than rounding."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 1e-7))

    def forward(self, x):
        return self.mlp(x) + self.scale * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class Squeezing(Around):
    """Takes no batch of one row: `squeeze` leaves `[L]` of `[1, L, 1]`."""

    def __init__(self, mlp):
        super().__init__(mlp)
        self.weigh = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        weights = self.weigh(x).squeeze().sigmoid()
        return self.mlp(x) * weights[:, :, None]


def clipped(gradient):
    """By the norm of the gradient as a whole, which differs with what else has a forward with it."""
    return gradient * (1e-3 / gradient.norm().clamp(min=1e-3))


class ClippingHook(Around):
    def forward(self, x):
        out = self.mlp(x)
        if out.requires_grad:
            out.register_hook(clipped)
        return out


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return clipped(gradient)


class ClippingFunction(Around):
    def forward(self, x):
        return Clip.apply(self.mlp(x))


def with_mlp(kind):
    def change(layer):
        layer.mlp = kind(layer.mlp)

    return change


def observe(layer):
    """As in quantization-aware training: its scale follows the largest number that it has seen."""
    observer = quantization.MovingAverageMinMaxObserver
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj, quantization.FakeQuantize.with_args(observer=observer)())


LAYERS = {
    "counter in a buffer": with_mlp(Counting),
    "counter in an attribute": with_mlp(Warming),
    "running mean": with_mlp(Mean),
    "batch norm": with_mlp(Normalising),
    "table": with_mlp(Table),
    "small gate": with_mlp(Shifted),
    "no batch of one": with_mlp(Squeezing),
    "gradient clipped in a hook": with_mlp(ClippingHook),
    "gradient clipped in a function": with_mlp(ClippingFunction),
    "observer": observe,
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer.self_attn.q_proj),
    "spectral norm, a hook": lambda layer: spectral_norm(layer.self_attn.q_proj),
}


def llama_with(change):
    def make():
        model = tiny_model("llama")
        change(model.model.layers[0])
        return model

    return make


SCHEDULES = {
    "on-policy": {},
    "old log-probs": {"steps_per_generation": 4, "max_steps": 4},
    "reference": {"beta": 0.1},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_unknown_or_changing_code_trains_as_in_stock(tmp_path, name, schedule):
    options = dict(SCHEDULES[schedule])
    if name == "small gate":
        options |= {"max_steps": 4, "max_grad_norm": 0.0}
    if schedule == "reference":  # TRL loads it from the policy's checkpoint, without what is changed here
        save_checkpoint("llama", tmp_path, torch.float32)
    make = llama_with(LAYERS[name])

    def named():
        model = make()
        model.config._name_or_path = str(save_checkpoint("llama", tmp_path, torch.float32))
        return model

    fused, stock = compare(tmp_path, Level.HEAD, named, **options)
    assert fused.fused_layout() == "padded"
    counts = [
        [part.calls for part in trainer.model.modules() if isinstance(part, Warming)] for trainer in (fused, stock)
    ]
    assert counts[0] == counts[1]
    if name == "small gate":
        assert stock.model.model.layers[0].mlp.scale.abs().max() > 1e-4


@pytest.mark.parametrize("options", [{"fused_layout": "padded"}, {"fused_max_tokens_per_forward": 10_000}], ids=str)
def test_options_make_no_difference_to_it(tmp_path, options):
    compare(tmp_path, Level.HEAD, llama_with(with_mlp(ClippingHook)), fused=options, gradient_accumulation_steps=4)


# The mask


class Deaf(LlamaModel):
    """A backbone that leaves the attention mask out, so that tokens attend to padding on their left."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=None, **kwargs)


def deaf_backbone():
    model = tiny_model("llama")
    model.model.__class__ = Deaf
    return model


def deaf_attention(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})


@contextmanager
def attention_registered():
    AttentionInterface.register("deaf", deaf_attention)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["deaf"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["deaf"], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["deaf"]


def with_deaf_attention():
    model = tiny_model("llama")
    model.set_attn_implementation("deaf")
    return model


def test_a_model_that_leaves_the_mask_out_trains_as_in_stock(tmp_path):
    heeding = train(tmp_path, GRPOTrainer)
    compare(tmp_path, Level.HEAD, deaf_backbone, steps_per_generation=2)
    with attention_registered():
        fused, _ = compare(tmp_path, Level.HEAD, with_deaf_attention, steps_per_generation=2)
    # It makes a difference: rows have padding on their left
    with pytest.raises(AssertionError):
        assert_same_training((fused, *train(tmp_path, GRPOTrainer, deaf_backbone)[1:]), heeding)


# The head, and what sees every call


class CastingHead(nn.Linear):
    """`__call__` of its own, which expects logits."""

    def __call__(self, x):
        return super().__call__(x).float()


def with_casting_head():
    model = tiny_model("llama")
    model.lm_head.__class__ = CastingHead
    return model


def test_a_head_with_a_call_of_its_own_is_called_as_in_stock(tmp_path):
    compare(tmp_path, Level.STOCK, with_casting_head)


def scaled(output):
    """Logits times 0.8."""
    if isinstance(output, torch.Tensor):
        return 0.8 * output if output.shape[-1] == VOCAB_SIZE else output
    if getattr(output, "logits", None) is not None:  # TRL's own head returns none
        output.logits = 0.8 * output.logits
    return output


class ScalingHook(ModelHook):
    def post_forward(self, module, output):
        return scaled(output)


class ScalingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return scaled(output) if function is nn.functional.linear else output


class ScalingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return scaled(output) if function is torch.ops.aten.mm.default else output


@contextmanager
def hook_on_every_module(model):
    def hook(module, args, output):
        return scaled(output) if type(module) is nn.Linear else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def gather_replaced(model):
    """What TRL's log-probs take the token's logit with, up to 1.14."""
    gather = torch.gather
    with mock.patch.object(torch, "gather", lambda *args, **kwargs: 0.8 * gather(*args, **kwargs)):
        yield


AROUND = {
    "hook on every module": hook_on_every_module,
    "mode of functions": lambda model: ScalingFunctions(),
    "mode of operations": lambda model: ScalingOperations(),
    "a function that log-probs call": gather_replaced,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", AROUND)
def test_what_sees_every_call_sees_those_of_stock(tmp_path, name):
    stock = train(tmp_path, GRPOTrainer, around=AROUND[name])
    assert_same_training(train(tmp_path, FusedGRPOTrainer, around=AROUND[name]), stock)


@pytest.mark.parametrize("place", ["head", "model"])
def test_a_hook_of_accelerate_s_class_sees_the_output_of_stock(tmp_path, place):
    def add_hook(trainer):
        add_hook_to_module(trainer.model.lm_head if place == "head" else trainer.model, ScalingHook())

    compare(tmp_path, Level.STOCK, change=add_hook)


# Options that TRL reads at a certain time


class Sets(TrainerCallback):
    """Sets attributes of the configuration or the arguments when a training begins."""

    def __init__(self, **values):
        self.values = values

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for name, value in self.values.items():
            setattr(args if hasattr(args, name) else model.config, name, value)


def sets(**values):
    return lambda trainer: trainer.add_callback(Sets(**values))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "values",
    [{"final_logit_softcapping": 2.0}, {"logit_scale": 0.5}, {"logits_scaling": 2.0}],
    ids=lambda v: next(iter(v)),
)
def test_a_configuration_that_changes_when_training_begins_is_read_when_stock_reads_it(tmp_path, kind, values):
    compare(tmp_path, Level.WINDOW, lambda: tiny_model(kind), sets(**values))


def test_a_head_in_float32_is_asked_for_when_stock_asks(tmp_path):
    """Under mixed precision, where both differ by rounding: each against itself without the change, to the bit."""
    is_read = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        plain = train(tmp_path, cls, bf16=True)[1]
        late = train(tmp_path, cls, change=sets(cast_lm_head_to_fp32=True), bf16=True)[1]
        is_read.append(not all(torch.equal(late[name], value) for name, value in plain.items()))
    assert is_read[0] == is_read[1]


@pytest.mark.parametrize(("scale", "cap"), [(300.0, 30.0), (8.0, 1.0)])
def test_a_softcap_of_another_name_counts_where_it_does_in_stock(tmp_path, scale, cap):
    """TRL >= 1.15 does not know RecurrentGemma's, the model's own forward does."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "lru_width": 64, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_window_size": 64}
    if TRANSFORMERS.major < 5:
        pytest.skip("its state holds the graph of the forward before, also in stock")
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False}

    def model():
        kinds = ["recurrent", "recurrent", "attention"]
        config = RecurrentGemmaConfig(**sizes, **heads, **tokens, logits_soft_cap=cap, block_types=kinds)
        model = AutoModelForCausalLM.from_config(config)
        model.lm_head.weight.data.mul_(scale)
        return model

    stock = train(tmp_path, GRPOTrainer, model, max_steps=2)
    assert_same_training(train(tmp_path, FusedGRPOTrainer, model, max_steps=2), stock)


def test_an_adaption_prompt_trains_where_it_does_in_stock(tmp_path):
    """It keeps the bound forward that a layer had when the adapter was made, and newer TRL puts one on the model."""
    peft = pytest.importorskip("peft")
    outcomes = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
        try:
            outcomes.append(train(tmp_path, cls, peft_config=config))
        except Exception as error:
            outcomes.append(error)
    stock, fused = outcomes
    assert isinstance(fused, Exception) == isinstance(stock, Exception), outcomes
    if isinstance(stock, Exception):
        assert type(fused) is type(stock)
    else:
        assert_same_training(fused, stock)
