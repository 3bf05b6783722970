"""cuDNN in torch: for which small problems does the backward end the process? Needs torch and a GPU.

Every problem runs in a process of its own, through the operator behind scaled_dot_product_attention. Exit
code 1: a process ended by a signal.
"""

import os
import sys

import torch


def differentiate(batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype, causal: bool) -> None:
    shapes = (queries, keys, keys)
    q, k, v = (
        torch.randn(batch, heads, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in shapes
    )
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out = op(q, k, v, None, True, 0.0, causal, False)[0]
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()


wrong = 0
for dtype in (torch.float16, torch.bfloat16):
    for causal in (False, True):
        for sizes in ((1, 1, 1, 32), (1, 3, 1, 1), (1, 1, 1, 1), (1, 3, 1, 32), (2, 1, 1, 1), (1, 3, 32, 1)):
            child = os.fork()
            if child == 0:
                try:
                    differentiate(*sizes, dtype, causal)
                except Exception as error:
                    print(str(error).partition("\n")[0], flush=True)
                    os._exit(2)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            wrong += code < 0
            said = "fine" if code == 0 else f"signal {-code}" if code < 0 else "an error"
            print(f"{dtype} causal={causal} batch, heads, queries, keys {sizes}: {said}", flush=True)
print(torch.__version__, torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
sys.exit(wrong > 0)
