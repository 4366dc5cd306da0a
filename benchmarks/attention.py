"""
Attention of packed sequences, forward and backward: torch's FlashAttention, and FlashAttention 3 and 4 where their
packages are there, against cuDNN's attention for ragged rows, and cuDNN's on each sequence by itself. Time, the time of
the first call at new lengths, and the distance of outputs and gradients from attention in float32.

    python benchmarks/attention.py --json attention.json
"""

import json
import statistics
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from _measure import environment, flash_attention_by
from _rollout import Lengths
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


HEADS, KEY_HEADS, WIDTH = 16, 8, 128
LENGTHS = {
    "600": Lengths(),
    "4000": Lengths(median=4000, longest=16_384),
    "20000": Lengths(median=20_000, sigma=0.5, longest=32_768),
}
SEQUENCES = {"600": 16, "4000": 4, "20000": 1}

app = typer.Typer(add_completion=False)


def flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Any]:
    """FlashAttention's output, and a function of its gradient that returns those of queries, keys and values."""
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, True, False
    )

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, state, unused
        )

    return out, backward


def flash_by(implementation: str) -> Any:
    """Another implementation of FlashAttention, from a package of its own, in the place of torch's."""

    def attention(*arguments: Any) -> tuple[Tensor, Any]:
        with flash_attention_by(implementation):
            out, backward = flash(*arguments)

        def backward_by(grad: Tensor) -> tuple[Tensor, ...]:
            with flash_attention_by(implementation):
                return backward(grad)

        return out, backward_by

    return attention


def cudnn(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Any]:
    """The same of cuDNN's for ragged rows."""
    out, lse, *_, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, cu, cu, longest, longest, True, 0.0, True, False
    )

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten._cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, offset, None, cu, cu, longest, longest, 0.0, True
        )

    return out, backward


def cudnn_rounded(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Any]:
    """The same with the longest length and the number of sequences rounded up, so that fewer plans are built."""
    count = len(cu) - 1
    sequences = 1 << (count - 1).bit_length() if count > 1 else 1
    return cudnn(q, k, v, F.pad(cu, (0, sequences - count), value=int(cu[-1])), -(-longest // 1024) * 1024)


def apart(backend: SDPBackend) -> Any:
    """One backend of SDPA on each sequence by itself."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Any]:
        bounds = cu.tolist()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad(), sdpa_kernel(backend):
            parts = []
            for begin, end in pairwise(bounds):
                query, key, value = (t[begin:end].transpose(0, 1).unsqueeze(0) for t in leaves)
                part = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                parts.append(part.squeeze(0).transpose(0, 1))
            out = torch.cat(parts)
        return out, lambda grad: torch.autograd.grad(out, leaves, grad)

    return attention


KERNELS = {
    "flash": flash,
    "FA3": flash_by("FA3"),
    "FA4": flash_by("FA4"),
    "cudnn": cudnn,
    "cudnn, rounded": cudnn_rounded,
    "cudnn apart": apart(SDPBackend.CUDNN_ATTENTION),
}


def truth(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients in float32."""
    tensors = [t.float() for t in (q, k, v)]
    out, backward = apart(SDPBackend.EFFICIENT_ATTENTION)(
        tensors[0], *(t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in tensors[1:]), cu, 0
    )
    grads = backward(grad.float())
    halves = [g.unflatten(1, (KEY_HEADS, -1)).sum(2) for g in grads[1:]]
    return [out.detach(), grads[0], *halves]


def measure(name: str, kernel: str, repeats: int) -> dict[str, Any]:
    """One kernel at one distribution of lengths."""
    record: dict[str, Any] = {"lengths": name, "kernel": kernel}
    times, firsts = [], []
    for draw in range(3):
        generator = torch.Generator().manual_seed(draw)
        prompts, completions = LENGTHS[name].draw(1, SEQUENCES[name], generator)
        lengths = [p + c for p, c in zip(prompts, completions, strict=True)]
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        torch.manual_seed(draw)
        heads = (HEADS, KEY_HEADS, KEY_HEADS)
        q, k, v = (torch.randn(sum(lengths), n, WIDTH, device="cuda", dtype=torch.bfloat16) for n in heads)
        grad = torch.randn_like(q)
        for i in range(repeats + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            out, backward = KERNELS[kernel](q, k, v, cu, max(lengths))
            grads = backward(grad)
            torch.cuda.synchronize()
            (times if i else firsts).append((time.perf_counter() - start) * 1e3)
        if draw == 0 and name == "600":
            right = truth(q, k, v, cu, grad)
            pairs = zip((out, *grads[:3]), right, strict=True)
            record["errors"] = [f"{((a.float() - b).norm() / b.norm()).item():.2e}" for a, b in pairs]
    record |= {"tokens": sum(lengths), "ms": statistics.median(times), "all_ms": [round(t, 2) for t in times]}
    return record | {"first_ms": [round(t, 1) for t in firsts]}


@app.command()
def main(
    repeats: Annotated[int, typer.Option(help="calls that count, of each of three draws", min=1)] = 5,
    kernels: Annotated[list[str] | None, typer.Option("--kernel", help="some of them; repeatable")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the record goes")] = None,
    commit: Annotated[str | None, typer.Option(help="commit to record where git cannot be asked")] = None,
) -> None:
    """Compare the kernels."""
    results = []
    for name in LENGTHS:
        for kernel in kernels or KERNELS:
            try:
                results.append(measure(name, kernel, repeats))
            except (RuntimeError, ImportError, ValueError) as error:
                results.append({"lengths": name, "kernel": kernel, "failed": str(error)[:200]})
            print(json.dumps(results[-1]), flush=True)
    if json_path is not None:
        record = {**environment("cuda", commit), "cudnn": torch.backends.cudnn.version(), "results": results}
        json_path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    app()
