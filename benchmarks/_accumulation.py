"""Accumulation windows of several trainers over one model and the same completions: time, memory and gradients."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from _instruments import hide_instruments
from _measure import GIB, logged_means
from _rollout import Lengths, Rollout
from _trainers import LORA_ON_ATTENTION, SHAPES, SharedModel, distance, make_model, norm, not_finite


ROWS, MICRO_BATCH, GROUP = 32, 4, 8
LENGTHS = {"tiny": Lengths(prompts=(4, 10), median=20, longest=64)}
# Rounding hardly moves the ratio of one token. The ratio of a sequence is the exponential of a sum over hundreds of
# tokens, so that gradients could not be compared in bfloat16
MODE = "token_truncate"


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs within every group, so that all sequences get a gradient."""
    return [sum(ids[:8]) % 97 / 97 for ids in completion_ids]


@dataclass
class Contender:
    """
    One trainer that is compared.

    Args:
        name (`str`): shown in the table.
        fused (`bool`): ours or stock's.
        micro_batch (`int`): sequences in a micro-batch; their number follows from it.
        options (`dict`): further options of its configuration.
        comparable (`bool`): whether the objective is stock's.
        backend (`str`, *optional*): `"no-cudnn"` keeps SDPA from taking cuDNN.
    """

    name: str
    fused: bool = True
    micro_batch: int = MICRO_BATCH
    options: dict[str, Any] = field(default_factory=dict)
    comparable: bool = True
    backend: str | None = None


class Stopwatch:
    """
    Stops while TRL makes tensors of the completions, decodes them and computes rewards. That work belongs to
    generation and is the same in every trainer. The log-probs that TRL computes in between count.
    """

    def __init__(self, trainer: Any, device: str):
        hide_instruments()
        self.device, self.seconds, self.since = device, 0.0, None
        generate, log_probs = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

        def generate_untimed(*args: Any) -> Any:
            self.stop()
            output = generate(*args)
            self._go()
            return output

        def log_probs_timed(*args: Any, **kwargs: Any) -> Any:
            if self.since is not None:  # in the loss
                return log_probs(*args, **kwargs)
            self._go()
            output = log_probs(*args, **kwargs)
            self.stop()
            return output

        trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies = (
            generate_untimed,
            log_probs_timed,
        )

    def start(self) -> None:
        """Start at zero."""
        self.seconds = 0.0
        self._go()

    def stop(self) -> float:
        """Wait for the device, stop, and return the seconds since the start."""
        self._wait()
        if self.since is not None:
            self.seconds += time.perf_counter() - self.since
        self.since = None
        return self.seconds

    def _go(self) -> None:
        self._wait()
        self.since = time.perf_counter()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class AccumulationBenchmark:
    """A model, a rollout, and one accumulation window after the other on them."""

    def __init__(self, size: str, lora: bool, device: str, seed: int):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        allocated = torch.cuda.memory_allocated if device == "cuda" else int
        before = allocated()
        self.size, self.device, self.seed = size, device, seed
        self.shared = SharedModel(
            make_model(size, device, dtype, LORA_ON_ATTENTION if lora else None), ROWS, reward, GROUP
        )
        self.rollout = Rollout.make(LENGTHS.get(size, Lengths()), ROWS // GROUP, GROUP, SHAPES[size][-1], seed)
        self.stock: list[torch.Tensor] | None = None
        self.stock_norm = 0.0
        self.truth: list[torch.Tensor] | None = None
        # In float32: a sampler that rounds like one of the contenders would leave no rounding noise in its ratios
        with self.shared.in_float32():
            sampler = self.build(Contender("sampler"))
            with self.shared.running(sampler):
                self.rollout.add_sampler_logps(sampler, seed)
        self.model_bytes = allocated() - before  # with the workspace of libraries

    def build(self, contender: Contender) -> Any:
        """The trainer of a contender."""
        options = {
            "vllm_importance_sampling_mode": MODE,
            "max_completion_length": LENGTHS.get(self.size, Lengths()).longest,
            "loss_type": "dapo",
            **contender.options,
        }
        return self.shared.build(contender.fused, contender.micro_batch, **options)

    def find_truth(self) -> None:
        """Compute the gradients of stock in float32, against which the errors of all others are measured."""
        with self.shared.in_float32():
            trainer = self.build(Contender("truth", fused=False, micro_batch=1))
            self.rollout.serve(trainer)
            with self.shared.running(trainer):
                self._accumulate(trainer, Stopwatch(trainer, self.device))
            self.truth = [gradient.clone() for gradient in self.shared.gradients()]
            self.shared.drop_gradients()

    def run(self, contender: Contender, repeats: int) -> dict[str, Any]:
        """
        Run one accumulation window that does not count, then `repeats` that do.

        Returns:
            `dict[str, Any]`: time and memory, the median norm of the gradients (in bfloat16 it moves by a few 1e-4 from
            one accumulation window to the next), and the errors of the last gradients.
        """
        trainer = self.build(contender)
        self.rollout.serve(trainer)
        clock = Stopwatch(trainer, self.device)
        seconds, peaks, norms = [], [], []
        with self.shared.running(trainer):
            if contender.backend == "no-cudnn":
                torch.backends.cuda.enable_cudnn_sdp(False)
            for _ in range(repeats + 1):
                elapsed, peak, loss = self._accumulate(trainer, clock)
                seconds.append(elapsed)
                peaks.append(peak)
                norms.append(norm(self.shared.gradients()))
        return {
            "name": contender.name,
            "micro_batch": contender.micro_batch,
            "options": contender.options,
            "ms": statistics.median(seconds[1:] or seconds) * 1e3,
            "all_ms": [round(s * 1e3, 2) for s in seconds[1:]],
            "peak_gib": max(peaks[1:] or peaks) / GIB if self.device == "cuda" else None,
            "loss": loss,
            "recomputed": logged_means(trainer).get("fused/rows_recomputed"),
            **self._gradients(contender, norms[1:] or norms),
        }

    def _accumulate(self, trainer: Any, clock: Stopwatch) -> tuple[float, int, float]:
        """Seconds, peak memory in bytes (weights included) and loss of one accumulation window."""
        self.shared.drop_gradients()
        torch.manual_seed(self.seed)  # TRL shuffles completions before it splits them into micro-batches
        steps = trainer.args.gradient_accumulation_steps
        examples = [trainer.train_dataset[0]] * ROWS
        resting = 0
        if self.device == "cuda":
            resting = torch.cuda.memory_allocated()  # the model, and the gradients kept for comparison
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        losses = []
        for step in range(steps):
            trainer.accelerator.gradient_state._set_sync_gradients(step == steps - 1)
            losses.append(trainer.training_step(trainer.model_wrapped, examples, None))
        elapsed = clock.stop()
        peak = torch.cuda.max_memory_allocated() - resting + self.model_bytes if self.device == "cuda" else 0
        return elapsed, peak, torch.stack(losses).sum().item()

    def _gradients(self, contender: Contender, norms: list[float]) -> dict[str, Any]:
        gradients = self.shared.gradients()
        bad = not_finite(gradients)
        grad_norm = statistics.median(norms)
        record: dict[str, Any] = {"not_finite": bad, "tensors": len(gradients)}
        record |= {"grad_norm": None, "all_norms": None} if bad else {"grad_norm": grad_norm, "all_norms": norms}
        is_reference = not contender.fused and contender.backend is None
        if is_reference and not bad:
            self.stock, self.stock_norm = [gradient.clone() for gradient in gradients], grad_norm
        if contender.comparable and not bad:
            if not is_reference and self.stock is not None:
                record["norm_difference"] = abs(grad_norm - self.stock_norm) / self.stock_norm
                record["distance"] = distance(gradients, self.stock)
            if self.truth is not None:
                record["norm_error"] = abs(grad_norm - norm(self.truth)) / norm(self.truth)
                record["error"] = distance(gradients, self.truth)
        self.shared.drop_gradients()
        return record
