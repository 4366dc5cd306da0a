"""Whole optimizer steps of several trainers, in turns, on one model, one optimizer and the same completions."""

import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _accumulation import MICRO_BATCH, Contender, Stopwatch, reward
from _architecture_models import IMAGE_SIDE, SPECIAL, VOCAB
from _architectures import Architecture
from _images import ImageRollout
from _measure import GIB, logged_means
from _rollout import Lengths, Rollout
from _trainers import SharedModel, clear_memory


GROUP = 8
LONG_S = 12.0  # a step of stock that takes longer is not repeated more than asked for: its warm-up counts


@dataclass
class Runner:
    """One contender with its trainer, and what its steps have shown."""

    contender: Contender
    repeats: int
    trainer: Any = None
    clock: Any = None
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether no further step is wanted: one failed, enough have run, or the first took long."""
        if "failed" in self.record:
            return True
        has_long_first = bool(self.seconds) and self.seconds[0] > LONG_S and not self.contender.fused
        return len(self.seconds) >= self.repeats + (0 if has_long_first else 1)

    def counted(self, values: list) -> list:
        """What counts of one value a step: all but the warm-up, where there was one."""
        return values[-self.repeats :] if len(values) > self.repeats else values


class StepBenchmark:
    """
    A model in float32, made-up completions, and whole optimizer steps on them as `Trainer.train` takes them: forward
    and backward of every micro-batch, gradient clipping, AdamW. The learning rate is zero, so that each step starts
    from the same weights.

    Args:
        model (`PreTrainedModel`): with float32 weights.
        architecture ([`Architecture`]): whose rollout to make.
        lengths ([`Lengths`]): of prompts and completions.
        rows (`int`): completions in a step.
        device (`str`): `"cuda"` or `"cpu"`; on CUDA trainers compute under autocast to bfloat16.
        size (`str`): `"real"` or `"tiny"`.
        seed (`int`): of lengths, tokens and noise.
        options (`dict`): further options of every trainer.
    """

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        lengths: Lengths,
        rows: int,
        device: str,
        size: str,
        seed: int,
        options: dict[str, Any],
    ):
        self.device, self.seed, self.rows = device, seed, rows
        self.architecture = architecture
        self.options = {
            "bf16": device == "cuda",
            "max_completion_length": lengths.longest,
            "learning_rate": 0.0,
            "weight_decay": 0.0,
            **architecture.trainer,
            **options,
        }
        self.group = min(GROUP, rows)
        self.shared = SharedModel(model, rows, reward, self.group)
        words = VOCAB[size] - SPECIAL
        self.rollout = Rollout.make(lengths, rows // self.group, self.group, words, seed)
        if architecture.images:
            self.rollout = ImageRollout.of(self.rollout, model.config, IMAGE_SIDE[size], self.group, seed)
        self.optimizer: Any = None
        self.first: Runner | None = None
        self.reference: list[torch.Tensor | None] | None = None
        self.reference_norm, self.reference_loss = 0.0, 0.0

    def build(self, contender: Contender) -> Any:
        """The trainer of a contender, on the one model and the one optimizer."""
        trainer = self.shared.build(contender.fused, contender.micro_batch, **{**self.options, **contender.options})
        if self.optimizer is None:
            self.optimizer = trainer.create_optimizer()
        trainer.optimizer = self.optimizer
        self.rollout.serve(trainer)
        return trainer

    def make_up_sampler(self) -> None:
        """The sampler's log-probs, by ours or, where that fails, by stock."""
        try:
            self._make_up_sampler(fused=True)
        except Exception:
            clear_memory()
            self._make_up_sampler(fused=False)

    def _make_up_sampler(self, fused: bool) -> None:
        trainer = self.build(Contender("sampler", fused=fused))
        with self.shared.running(trainer):
            self.rollout.add_sampler_logps(trainer, self.seed)

    def compare(self, runners: list[Runner]) -> list[dict[str, Any]]:
        """Run all contenders in turns; the first that does not fail is the reference. One record each."""
        self.make_up_sampler()
        for runner in runners:
            self._guarded(runner, self._build)
        while not all(runner.is_done for runner in runners):
            for runner in runners:
                if not runner.is_done:
                    self._guarded(runner, self._step)
        return [self._finish(runner) for runner in runners]

    def profile(self, runner: Runner, path: Path) -> None:
        """Write a trace of one more step, which does not count."""
        with torch.profiler.profile() as profiler:
            self._step(runner)
        profiler.export_chrome_trace(str(path))

    def _guarded(self, runner: Runner, action: Any) -> None:
        """Do something for a runner; what it raises is recorded, and the others go on."""
        try:
            action(runner)
        except Exception as error:
            runner.record["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            runner.record["traceback"] = traceback.format_exc(limit=-3)
            error.__traceback__ = None
            self.shared.drop_gradients()
            clear_memory()

    def _build(self, runner: Runner) -> None:
        runner.trainer = self.build(runner.contender)
        runner.clock = Stopwatch(runner.trainer, self.device)

    def _step(self, runner: Runner) -> None:
        """One optimizer step, and at a contender's first one a look at its gradients."""
        trainer, clock = runner.trainer, runner.clock
        torch.manual_seed(self.seed)  # TRL shuffles completions before it splits them into micro-batches
        self.shared.drop_gradients()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps, examples = trainer.args.gradient_accumulation_steps, self.rollout.examples()
        losses: list[torch.Tensor] = []
        with self.shared.running(trainer):
            clock.start()
            for step in range(steps):
                trainer.accelerator.gradient_state._set_sync_gradients(step == steps - 1)
                losses.append(trainer.training_step(trainer.model_wrapped, examples, None))
            parameters = [p for p in self.shared.trained() if p.grad is not None]
            norm = trainer.accelerator.clip_grad_norm_(parameters, trainer.args.max_grad_norm)
            trainer.optimizer.step()
            seconds = clock.stop()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        runner.losses.append(torch.stack(losses).sum().item())
        if not runner.seconds:
            self._look_at_gradients(runner, float(norm), max(1.0, float(norm) / trainer.args.max_grad_norm))
        runner.seconds.append(seconds)
        runner.peaks.append(peak)
        runner.norms.append(float(norm))
        self.shared.drop_gradients()
        print(f"    {runner.contender.name}: {seconds:.2f} s, {peak / GIB:.2f} GiB, norm {float(norm):.5f}", flush=True)

    def _look_at_gradients(self, runner: Runner, norm: float, clipped_by: float) -> None:
        """Keep the reference's gradients outside the device, or compare others with them."""
        gradients = [parameter.grad for parameter in self.shared.trained()]
        if self.reference is None:
            self.reference = [None if g is None else (g * clipped_by).cpu() for g in gradients]
            self.first, self.reference_norm, self.reference_loss = runner, norm, runner.losses[0]
            return
        pairs = zip(gradients, self.reference, strict=True)
        runner.record["without_gradient_differ"] = sum((g is None) != (r is None) for g, r in pairs)
        squares = [
            (torch.linalg.vector_norm(g * clipped_by - r.to(g.device)).double() ** 2).item()
            for g, r in zip(gradients, self.reference, strict=True)
            if g is not None and r is not None
        ]
        runner.record["distance"] = sum(squares) ** 0.5 / self.reference_norm

    def _finish(self, runner: Runner) -> dict[str, Any]:
        contender, times = runner.contender, runner.counted(runner.seconds)
        record: dict[str, Any] = {
            "name": contender.name,
            "micro_batch": contender.micro_batch,
            "options": contender.options,
        }
        record |= runner.record
        if runner.seconds:
            record |= {
                "ms": statistics.median(times) * 1e3,
                "all_ms": [round(s * 1e3, 2) for s in times],
                "warm_up_ms": round(runner.seconds[0] * 1e3, 2) if len(times) < len(runner.seconds) else None,
                "peak_gib": max(runner.counted(runner.peaks)) / GIB if self.device == "cuda" else None,
                "grad_norm": statistics.median(runner.norms),
                "loss": statistics.median(runner.losses),
            }
            if runner is not self.first and self.reference_norm:
                record["loss_difference"] = abs(record["loss"] - self.reference_loss)
                record["norm_difference"] = abs(record["grad_norm"] - self.reference_norm) / self.reference_norm
        if contender.fused and runner.trainer is not None:
            record["layout"] = runner.trainer.fused_layout()
            record["recomputed"] = logged_means(runner.trainer).get("fused/rows_recomputed")
        return record


def tokens_and_padding(rollout: Rollout) -> dict[str, Any]:
    """How large a rollout is, for a record."""
    return {"tokens": rollout.tokens, "width": rollout.width, "padding": round(rollout.padding, 4)}


def wanted(
    repeats: int,
    stock_repeats: int,
    forced: tuple[str, ...],
    micro_batch: int = MICRO_BATCH,
    arms: Sequence[dict[str, Any]] = (),
) -> list[Runner]:
    """Stock, ours, ours with further options, and ours with layouts forced."""
    runners = [Runner(Contender("stock", fused=False, micro_batch=micro_batch), stock_repeats)]
    runners.append(Runner(Contender("ours", micro_batch=micro_batch), repeats))
    for arm in arms:
        name = "ours, " + ", ".join(f"{option}={value}" for option, value in arm.items())
        runners.append(Runner(Contender(name, micro_batch=micro_batch, options=arm), repeats))
    for layout in forced:
        contender = Contender(f"ours, {layout} rows", micro_batch=micro_batch, options={"fused_layout": layout})
        runners.append(Runner(contender, stock_repeats))
    return runners


def now() -> float:
    """Seconds of a clock that only goes forward."""
    return time.perf_counter()
