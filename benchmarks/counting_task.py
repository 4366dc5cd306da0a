"""A small counting task for benchmarks that generate: its sizes, a checkpoint made on the spot, and a reward."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Setup:
    """One experiment: model sizes, lengths in tokens, rows per micro-batch, and the training options that matter."""

    steps: int = 20
    vocab: int = 151_936
    hidden: int = 1024
    layers: int = 4
    heads: int = 8
    head_dim: int = 128
    completion: int = 256
    rows: int = 4
    accumulation: int = 4
    generations: int = 8
    warm_up: int = 100
    learning_rate: float = 1e-6
    ratio_mode: str = "sequence_mask"
    weights: str = "float32"
    bf16: bool = True
    mean_length: int | None = None  # of completions that end at random, see `end_at_random`
    seed: int = 42

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


TINY = Setup(
    steps=3, vocab=2048, hidden=64, layers=2, heads=2, head_dim=32, completion=48, rows=4, accumulation=2, warm_up=40
)


def counting_text(rng: random.Random) -> tuple[str, str]:
    """A prompt and its continuation, of widely varying length: `count 7 to 10:` and ` 7 8 9 10`."""
    start = rng.randrange(100)
    stop = start + rng.randrange(2, 240)
    return f"count {start} to {stop}:", "".join(f" {number}" for number in range(start, stop + 1))


def make_checkpoint(path: Path, setup: Setup) -> None:
    """Save a Qwen3 of the given size, trained just long enough to end its completions, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(setup.seed)
    texts = [counting_text(rng) for _ in range(4000)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator((prompt + answer for prompt, answer in texts), trainer)
    # Every id the model can emit must decode: fill the vocabulary up with entries that no merge leads to.
    state = json.loads(bpe.to_str())
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] |= {f"unused{index}": index for index in range(len(vocab), setup.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token="<pad>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
    )
    torch.manual_seed(setup.seed)
    config = Qwen3Config(
        vocab_size=setup.vocab,
        hidden_size=setup.hidden,
        intermediate_size=3 * setup.hidden,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.heads // 2,
        head_dim=setup.head_dim,
        max_position_embeddings=4 * setup.completion,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.device(setup.device):
        model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step in range(setup.warm_up):
        lines = [prompt + answer + "<eos>" for prompt, answer in rng.sample(texts, 16)]
        batch = tokenizer(lines, return_tensors="pt", padding=True, padding_side="right").to(setup.device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.autocast(setup.device, torch.bfloat16):
            loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == setup.warm_up - 1:
            print(f"warm-up {step:4d} loss {loss.item():.3f}", file=sys.stderr)
    if setup.mean_length is not None:
        end_at_random(model, setup.mean_length)
    model.to(getattr(torch, setup.weights)).save_pretrained(path)
    tokenizer.save_pretrained(path)


@torch.no_grad()
def end_at_random(model: Any, mean_length: int) -> None:
    """
    Let a model with random weights and tied embeddings end its completions with nearly the same probability at each
    token, so that their lengths are geometric. One hidden dimension is the same for every token, and no layer writes to
    it. EOS is zero in all others, and in this one so large that it is as likely as `1 / mean_length`, on average over
    random tokens.
    """
    config, weight = model.config, model.get_input_embeddings().weight  # [V, H]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    weight[:, 0] = 0.1
    weight[config.pad_token_id] = weight[-1]  # zero else, and the gradient where it is sampled would be NaN
    weight[config.eos_token_id] = 0.0
    tokens = torch.randint(config.vocab_size, (8, 256), device=weight.device)
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)  # [N, H]
    others = (hidden @ weight.T).logsumexp(-1)  # [N]
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        is_rare = (middle * hidden[:, 0] - others).sigmoid().mean() < 1 / mean_length
        low, high = (middle, high) if is_rare else (low, middle)
    weight[config.eos_token_id, 0] = low


def numbers_right(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of the numbers counted correctly, plus a term that keeps any two completions apart."""
    rewards = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        start, stop = (int(word.rstrip(":")) for word in prompt.split()[1::2])
        expected = [str(number) for number in range(start, stop + 1)]
        right = sum(got == want for got, want in zip(completion.split(), expected, strict=False))
        rewards.append(right / len(expected) + (sum(ids) % 11) / 50)
    return rewards
