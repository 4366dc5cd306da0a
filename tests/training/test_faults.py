"""
Exceptions within a training, place by place: the training that the user starts next is that of stock after the same
exception, and nothing of this package stays where it outlives a training.
"""

import gc
import importlib
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.code_of import as_code_of
from tests.oracle import relative_error
from tests.tiny_training import make_trainer
from trl_fused_grpo import FusedGRPOTrainer
from trl_fused_grpo.modeling.attention.packed import _living
from trl_fused_grpo.training.findings import Level

from .sampler import use_sampler


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = {
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "max_completion_length": 5,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": True,
    "num_generations": 2,
}
SHARED = {"fused_max_tokens_per_forward": 10_000}  # all micro-batches of a window in one forward
WINDOW = 1  # the exception comes in the second optimizer step


class FaultError(Exception):
    """Thrown on purpose."""


class Fault(TrainerCallback):
    """
    Throws once, at a place in the second optimizer step. Functions of torch and of Accelerate are replaced by some that
    count as theirs: for those of a user's the training would be another.
    """

    def __init__(self, place):
        self.place, self.is_thrown, self.in_backward, self.losses = place, False, False, 0
        self.trainer = None

    def throw(self, place):
        if place == self.place and not self.is_thrown and self.trainer.state.global_step == WINDOW:
            self.is_thrown = True
            raise FaultError(place)

    def on_pre_optimizer_step(self, *_, **__):
        self.throw("optimizer")

    def on_step_end(self, *_, **__):
        self.losses = 0

    def on_log(self, *_, **__):
        self.throw("log")

    @contextmanager
    def in_place(self):
        with ExitStack() as stack:
            # A norm calls the latter; who replaces a linear product has another path than the one to be tested
            functions = [(F, "embedding", self.embedding), (torch, "rsqrt", self.rsqrt)]
            functions += [(torch.autograd, "backward", self.backward), (Accelerator, "gather", self.gather)]
            for owner, name, replacement in functions:
                function = as_code_of(getattr(owner, "__module__", owner.__name__), replacement(getattr(owner, name)))
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    def embedding(self, original):
        def embedding(*args, **kwargs):
            self.throw("forward" if torch.is_grad_enabled() else "generation")
            return original(*args, **kwargs)

        return embedding

    def rsqrt(self, original):
        def rsqrt(*args, **kwargs):
            if self.in_backward:
                self.throw("layer computed again")
            return original(*args, **kwargs)

        return rsqrt

    def backward(self, original):
        def backward(*args, **kwargs):
            # Micro-batches that share a forward have one backward
            before, self.in_backward = self.in_backward, self.trainer.accelerator.sync_gradients
            try:
                original(*args, **kwargs)
            finally:
                self.in_backward = before
            if self.trainer.accelerator.sync_gradients:
                self.throw("backward")

        return backward

    def gather(self, original):
        def gather(accelerator, *args, **kwargs):
            if sys._getframe(1).f_code.co_name == "_compute_loss":
                self.losses += 1
                if self.trainer._step % 3 == 1:
                    self.throw("loss of a later micro-batch")
            return original(accelerator, *args, **kwargs)

        return gather

    def reward(self, completion_ids, **_):
        self.throw("reward")
        return [float(len(ids)) + ids[0] % 7 for ids in completion_ids]


PLACES = (
    *("reward", "generation", "forward", "loss of a later micro-batch", "layer computed again", "backward"),
    *("optimizer", "log"),
)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """Accelerate collects garbage at each start of a training: what there was before needs no look."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def left_over():
    """What stands where it outlives a training."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("_left_over").left_over
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def left_after_fault(left_over):
    """The same, as `soak.py` asks for it."""
    return importlib.import_module("_faults").left_after_fault


def interrupted(folder, cls, place, **options):
    """A trainer whose training has ended with an exception, which is gone."""
    torch.manual_seed(0)
    fault = Fault(place)
    peft_config, has_sampler = options.pop("peft_config", None), options.pop("has_sampler", False)
    with mock.patch("tests.tiny_training.reward_length", fault.reward):
        trainer = make_trainer(folder, cls, peft_config=peft_config, **{**OPTIONS, **options})
    fault.trainer = trainer
    trainer.add_callback(fault)
    if has_sampler:
        use_sampler(trainer)
    torch.manual_seed(1)
    with fault.in_place(), pytest.raises(FaultError, match=place):
        trainer.train()
    assert fault.is_thrown
    assert cls is GRPOTrainer or trainer._fused.ladder.level == Level.WINDOW
    gc.collect()
    return trainer


def trained_again(trainer, **options):
    """Its next training: what it logged, and the weights then."""
    torch.manual_seed(2)
    trainer.train(**options)
    logs = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "step_time"))}
        for entry in trainer.state.log_history
    ]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return logs, weights


def assert_same_training(ours, stock):
    (logs, weights), (stock_logs, stock_weights) = ours, stock
    assert len(logs) == len(stock_logs)
    for entry, expected in zip(logs, stock_logs, strict=True):
        found = {name: value for name, value in entry.items() if not name.startswith("fused/")}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    assert max(relative_error(weights[name], stock_weights[name]) for name in stock_weights) < 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
def test_the_next_training_is_stocks_after_the_same_exception(tmp_path, place, left_over):
    stock = trained_again(interrupted(tmp_path, GRPOTrainer, place))
    trainer = interrupted(tmp_path, FusedGRPOTrainer, place, **SHARED)
    assert not _living  # no graph is held, and with it transformers has its own attention back
    after_exception = left_over(trainer)
    assert_same_training(trained_again(trainer), stock)
    gc.collect()
    assert after_exception == left_over(trainer)  # of a training that ended by itself


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["forward", "loss of a later micro-batch", "layer computed again"])
def test_so_it_is_with_lora_and_a_reference(tmp_path, place, left_over):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    options = {"beta": 0.1, "peft_config": config}
    stock = trained_again(interrupted(tmp_path, GRPOTrainer, place, **options))
    trainer = interrupted(tmp_path, FusedGRPOTrainer, place, **options, **SHARED)
    after_exception = left_over(trainer)
    assert_same_training(trained_again(trainer), stock)
    gc.collect()
    at_the_end = left_over(trainer)
    if place == "layer computed again":  # torch holds a graph whose recomputation raised, and with it our attention
        assert at_the_end.keys() >= {"tables", "masks", "files"}
        after_exception |= {name: at_the_end[name] for name in ("tables", "masks", "files")}
    assert after_exception == at_the_end


@pytest.mark.sample(2)
@pytest.mark.parametrize("has_sampler", [False, True], ids=["", "sampler"])
@pytest.mark.parametrize("place", ["forward", "loss of a later micro-batch", "backward", "optimizer"])
@pytest.mark.parametrize(("micro_batches", "iterations"), [(2, 1), (3, 2), (4, 1)])
def test_so_it_is_where_the_weights_move_while_a_generation_batch_is_in_use(
    tmp_path, micro_batches, iterations, place, has_sampler
):
    """The training that comes next takes the old log-probs of the generation, where those left out are computed."""
    options = {"steps_per_generation": micro_batches, "num_iterations": iterations, "num_generations": 4}
    options["has_sampler"] = has_sampler
    stock = trained_again(interrupted(tmp_path, GRPOTrainer, place, **options))
    trainer = interrupted(tmp_path, FusedGRPOTrainer, place, **options, **SHARED)
    assert_same_training(trained_again(trainer), stock)


def test_a_training_resumes_from_the_checkpoint_before_the_exception(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    place = "loss of a later micro-batch"
    stock = trained_again(interrupted(tmp_path / "stock", GRPOTrainer, place, **options), resume_from_checkpoint=True)
    trainer = interrupted(tmp_path / "fused", FusedGRPOTrainer, place, **options, **SHARED)
    assert_same_training(trained_again(trainer, resume_from_checkpoint=True), stock)


def test_detach_undoes_everything_after_an_exception(tmp_path, left_over):
    untouched = left_over(make_trainer(tmp_path, GRPOTrainer, **OPTIONS))
    trainer = interrupted(tmp_path, FusedGRPOTrainer, "loss of a later micro-batch", **SHARED)
    trainer.detach()
    found = left_over(trainer)
    of_trainer = ("arguments", "trainer", "in modules")
    assert {name: found[name] for name in found if name not in of_trainer} == {
        name: untouched[name] for name in untouched if name not in of_trainer
    }
    assert not found["in modules"]


@pytest.fixture
def held_errors(monkeypatch):
    """Errors of a backward, which a thread holds until it is told to end, as that of autograd for CUDA may."""
    ends, threads, original = threading.Event(), [], torch.autograd.backward

    def hold(_):
        ends.wait(60)

    def backward(*args, **kwargs):
        try:
            original(*args, **kwargs)
        except FaultError as error:
            threads.append(threading.Thread(target=hold, args=[error]))
            threads[-1].start()
            raise

    monkeypatch.setattr(torch.autograd, "backward", backward)
    yield ends
    ends.set()
    while threads:
        threads.pop().join()


def test_attention_is_given_back_when_another_thread_lets_go_of_the_graph(
    tmp_path, left_over, left_after_fault, held_errors
):
    trainer = interrupted(tmp_path, FusedGRPOTrainer, "layer computed again", **SHARED)
    held = left_over(trainer)
    clean = {**held, "tables": [], "masks": [], "files": []}
    assert held["tables"]
    assert held["masks"]
    assert left_after_fault(trainer, clean, seconds=0.05) == held  # what stays is found
    threading.Timer(0.2, held_errors.set).start()
    assert left_after_fault(trainer, clean) == clean
    assert not _living
