"""FlashAttention's forward and backward over packed rows, emulated in any precision, and rows to run them on."""

import pytest
import torch

from tests.attention_oracle import visible
from tests.oracle import relative_error
from trl_fused_grpo.modeling.attention.kernels import Boundaries
from trl_fused_grpo.modeling.attention.varlen import SharedPrefixKV, cu_seqlens_arguments


HEADS, KEY_HEADS, WIDTH = 4, 2, 16
# Lengths of queries and of keys of three sequences, and the place of each key. In the second case the second sequence
# attends to the first 4 tokens of the first one too
APART = ([7, 1, 12], [7, 1, 12], None)
SHARED = ([7, 1, 12], [7, 5, 12], [*range(7), *range(4), *range(7, 20)])
SEQUENCES = pytest.mark.parametrize("sequences", [APART, SHARED], ids=["apart", "shared-prompt"])
WINDOWS = pytest.mark.parametrize("window", [None, 3], ids=["full", "sliding-window"])


def random_tensors(count, width=WIDTH, value_width=WIDTH, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (HEADS, width), (KEY_HEADS, width), (KEY_HEADS, value_width)
    return [torch.randn(1, heads, count, width, dtype=dtype, requires_grad=True) for heads, width in shapes]


def arguments(lengths, key_lengths, index, count):
    shared = None if index is None else SharedPrefixKV.at(torch.tensor(index), count)
    return cu_seqlens_arguments(lengths, key_lengths, shared, torch.device("cpu"))


def boundaries_of(options):
    return Boundaries(*(options[name] for name in Boundaries._fields))


def assert_same_with_gradients(output, expected, inputs, tolerance=1e-10):
    assert output.shape == expected.shape
    assert relative_error(output, expected) < tolerance
    weight = torch.randn_like(expected)
    found, exact = (torch.autograd.grad((o * weight).sum(), inputs) for o in (output, expected))
    assert all(relative_error(mine, other) < tolerance for mine, other in zip(found, exact, strict=True))


def emulated_forward(by_sequence):
    """FlashAttention's forward over sequences, in any precision."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, **windows):
        outputs, lses = [], []
        for scores, _, _, value in score_parts(q, k, v, cu_q, cu_k, is_causal, scale, **windows):
            lse = scores.logsumexp(-1)  # [heads, s]
            outputs.append(((scores - lse[..., None]).exp() @ value).transpose(0, 1))
            lses.append(lse)
        lse = torch.cat(lses, dim=1)
        if by_sequence:  # as older kernels lay it out
            padded = [torch.nn.functional.pad(part, (0, max_q - part.shape[1]), value=float("inf")) for part in lses]
            lse = torch.stack(padded)
        return torch.cat(outputs), lse, torch.zeros(2), torch.zeros(()), torch.zeros(())

    return forward


def emulated_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, state, unused, *, scale, **windows
):
    """FlashAttention's backward: probabilities from the log-sum-exp that it is given, `dO . O` from the output."""
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    parts = score_parts(q, k, v, cu_q, cu_k, is_causal, scale, **windows)
    groups = q.shape[1] // k.shape[1]
    for i, (scores, rows, columns, value) in enumerate(parts):
        lse_here = lse[:, rows] if lse.dim() == 2 else lse[i, :, : scores.shape[1]]
        p = (scores - lse_here[..., None]).exp()  # [heads, s, k]
        d_out, o = grad[rows].transpose(0, 1), out[rows].transpose(0, 1)
        d_scores = p * (d_out @ value.transpose(1, 2) - (d_out * o).sum(-1, keepdim=True)) * scale
        key = k[columns].transpose(0, 1).repeat_interleave(groups, 0)
        grads[0][rows] = (d_scores @ key).transpose(0, 1)
        d_key, d_value = d_scores.transpose(1, 2) @ q[rows].transpose(0, 1), p.transpose(1, 2) @ d_out
        for target, part in ((grads[1], d_key), (grads[2], d_value)):
            target[columns] = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(grads)


def score_parts(q, k, v, cu_q, cu_k, is_causal, scale, *, window_size_left, window_size_right):
    assert is_causal == (window_size_left is None)
    assert window_size_right == (None if is_causal else 0)
    window = None if window_size_left is None else window_size_left + 1
    groups = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        key, value = (t[columns].transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
        scores = q[rows].transpose(0, 1) @ key.transpose(1, 2) * scale
        mask = visible(scores.shape[1], scores.shape[2], window)
        yield scores.masked_fill(~mask, float("-inf")), rows, columns, value
