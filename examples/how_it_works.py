"""
How it works: one GRPO step without padding and without the logits of a batch, equal to stock TRL's.

    python examples/how_it_works.py

Read it downwards. Stock TRL pads every completion to the longest one, and the model computes on the padding. Its head
makes all logits twice, for the loss and for the gradient. The loss needs neither. It needs one log-probability for each
completion token. So this trainer overrides TRL's log-probability method and nothing else:

1. the forecast: which gradient will each log-probability receive?
2. packed rows: all sequences in one row, without padding;
3. the fused head: log-probabilities from a chunk of logits at a time, and their gradients in the same pass;
4. TRL's own loss, on these log-probabilities.

The model is tiny and made here, on a CPU, in float32. Loss and gradients are stock's within 1e-5.

The package does more, which is left out here: prompts that stand once for all of their completions, micro-batches that
share a forward, FlashAttention, compiled layers, LoRA, images, layers that carry a state, old and reference
log-probabilities, forecasts of every loss type, several processes, and a look at your own code before any of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fused_grpo.ops.linear_logps import FusedStats, fused_linear_logps
from trl_fused_grpo.ops.lm_head import LMHead


VOCABULARY = 64
LOGITS_MIB = 1 / 256  # 16 rows of logits at a time
TOLERANCE = 1e-5


# 1. The forecast
#
# A trained head needs the logits twice: for the log-probabilities, and for their gradient. That of the logits is
# g * (one_hot(target) - softmax(logits)), where g is the gradient of the log-probability. If g is known, one look is
# enough. And it is known. With TRL's default loss a token's term is -advantage * ratio. On-policy the ratio is one, and
# g is -advantage, times a factor that all tokens share. Backward compares with what arrives, finds the factor, and
# computes rows again whose forecast was wrong. A wrong forecast costs time. The gradient is right all the same.


@dataclass
class Forecast:
    grads: Tensor  # [N], up to one common factor

    @property
    def grad_rows(self) -> int:
        return len(self.grads)

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.grads[rows], None  # of the log-probabilities, and of the entropies


class TrainerOfThisFile(GRPOTrainer):
    forecast_error = 0.0

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.advantages = inputs["advantages"]  # [B]
        return super()._compute_loss(model, inputs)  # 4. TRL's own loss: it calls the method below

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        # 2. Packed rows: what counts of the padded rows [B, L], one sequence after the other. Positions begin at zero
        # with each sequence. transformers finds the sequences by that and lets no token see another sequence
        counts = attention_mask.bool()
        positions = attention_mask.cumsum(1) - 1
        packed, packed_positions = input_ids[counts][None], positions[counts][None]  # [1, N]
        hidden = model.model(input_ids=packed, position_ids=packed_positions, use_cache=False).last_hidden_state[0]

        # Completion tokens, and the hidden state in front of each, which predicts it
        is_target = counts.clone()
        is_target[:, :-logits_to_keep] = False
        place = torch.zeros_like(input_ids)
        place[counts] = torch.arange(packed.numel())
        rows = place[is_target] - 1  # [M], places in the packed row

        # 3. The fused head: it never holds more than a chunk of the logits [M, V]
        sequence = is_target.nonzero()[:, 0]  # [M], the sequence of each token
        forecast = Forecast(-self.advantages[sequence])
        forecast.grads[0] += self.forecast_error
        self.stats = FusedStats()
        logps, entropies = fused_linear_logps(
            hidden[rows],
            LMHead(model.lm_head.weight),
            input_ids[is_target],
            self.temperature,
            forecast,
            logits_mib=LOGITS_MIB,
            stats=self.stats,
        )
        assert entropies is not None

        # Back to the shape in which TRL's loss expects them, [B, T]. What it masks is zero
        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(input_ids.shape).masked_scatter(is_target, values)[:, -logits_to_keep:]

        self.tokens = input_ids.numel(), packed.numel()
        return padded(logps), padded(entropies), None


# From here on: a tiny model, a reward, and one optimizer step of both trainers


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Token 7 is written "w7"."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    tokens: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen3Config(**sizes, **heads, **tokens, initializer_range=0.1)
    return Qwen3ForCausalLM(config)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients = {name: parameter.grad.clone() for name, parameter in kwargs["model"].named_parameters()}


def one_step(trainer_class: type[GRPOTrainer], forecast_error: float = 0.0) -> tuple[Any, float, dict[str, Tensor]]:
    """One optimizer step, generation included: the trainer, the loss, and the gradients by name."""
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=48,
            max_grad_norm=0.0,  # gradients as they are
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        prompts = Dataset.from_dict({"prompt": ["w5 w6", "w7 w8 w9 w10 w11 w12 w13 w14", "w20", "w30 w31 w32 w33"]})
        keep = KeepGradients()
        tokenizer = make_tokenizer()
        trainer = trainer_class(make_model(), reward, args, prompts, processing_class=tokenizer, callbacks=[keep])
        if isinstance(trainer, TrainerOfThisFile):
            trainer.forecast_error = forecast_error
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer, trainer.state.log_history[0]["loss"], keep.gradients


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a parameter's gradient, relative to its norm."""
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def main() -> None:
    _, loss, expected = one_step(GRPOTrainer)
    print(f"stock TRL: loss {loss:.7f}")
    for title, forecast_error in (("this file", 0.0), ("this file, one forecast of many wrong", 0.5)):
        trainer, found_loss, found = one_step(TrainerOfThisFile, forecast_error)
        error, stats = distance(found, expected), trainer.stats
        print(f"{title}: loss {found_loss:.7f}, gradients within {error:.1e} of stock's")
        print(f"  last micro-batch: {trainer.tokens[1]} tokens in the model, {trainer.tokens[0]} with padding;")
        print(f"  {stats.rows} rows through the head, {stats.recomputed} of them a second time")
        assert abs(found_loss - loss) <= TOLERANCE * abs(loss) + 1e-7
        assert error <= TOLERANCE


if __name__ == "__main__":
    main()
