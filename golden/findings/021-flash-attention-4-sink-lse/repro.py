"""FlashAttention-4 with a sink far above every score: is the log-sum-exp the sink?

Needs torch; better flash-attn-4 and a GPU. Without one the end of the forward is computed as
flash_attn/cute/softmax.py, ``Softmax.finalize``, writes it, in fp32, and the gradient of the sink as
flash_bwd_postprocess.py, ``dsink_row_term``, does. Exit code 1: an LSE or a gradient is wrong.
"""

import math
import sys

import torch

DIM = 24
SCORES = (-40.0, -80.0, -88.0, -90.0, -282.0)
LOG2E = torch.tensor(math.log2(math.e))


def as_written(score: float) -> tuple[float, float, float]:
    """O of a value of 1, the LSE, and the sink's gradient where the LSE's is 1; one key, a sink of 0."""
    largest, total, sink = torch.tensor(score), torch.tensor(1.0), torch.tensor(0.0)
    scaled = largest * LOG2E
    total = total + torch.exp2(sink * LOG2E - scaled)
    lse = (scaled + total.log2()) * math.log(2.0)
    minus_dlse = -1.0  # rowsum(dO O) - dLSE, where dO is 0
    dsink = -torch.exp2((sink - lse) * LOG2E) * minus_dlse
    return float(1.0 / total), float(lse), float(dsink)


def on_gpu(score: float) -> tuple[float, float, float]:
    from flash_attn.cute import flash_attn_func

    q, k, v = (torch.zeros(1, 1, 1, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    q[..., 0], k[..., 0], v[..., :] = 1.0, score, 1.0
    sink = torch.zeros(1, device="cuda", requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, softmax_scale=1.0, learnable_sink=sink, return_lse=True)
    (dsink,) = torch.autograd.grad([out, lse], [sink], [torch.zeros_like(out), torch.ones_like(lse)])
    return float(out.flatten()[0]), float(lse), float(dsink)


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: as the source writes it")
wrong = 0
for score in SCORES:
    out, lse, dsink = (on_gpu if gpu else as_written)(score)
    right_lse = math.log1p(math.exp(score))
    wrong += not (abs(lse - right_lse) < 1e-5 and abs(dsink - 1.0) < 1e-3)
    print(
        f"score {score:g}, sink 0: O {out:.3g}, {math.exp(score - right_lse):.3g} is right; "
        f"LSE {lse:.3g}, {right_lse:.3g} is right; gradient of the sink {dsink:.3g}, 1 is right"
    )
sys.exit(wrong > 0)
