"""A small set of launches of every kernel, meant to run under compute-sanitizer; prints what it ran.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.kernels.sanitize

Each configuration of the table runs once on a ragged problem, each option once. Where there is no GPU
it runs in the interpreter, which shows that the script works and nothing else.
"""

import os

# The caching allocator would hide accesses past a tensor's end inside its own blocks.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch


def main():
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    import kernels
    from tests.kernels.attention import inputs, make
    from tests.kernels.exactness import configurations, distinct_blocks, faults

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = configurations()
    found = found if device.type == "cuda" else distinct_blocks(found)[:3]
    for configuration in found:
        wrong = faults(configuration, device, num_queries=70, num_keys=140)
        print(f"{configuration}: {'; '.join(wrong) or 'exact'}", flush=True)
    q, k, v = inputs(device, torch.bfloat16, batch=1, heads=4, kv_heads=2, nq=37, nk=75, d=40, dv=24)
    ends_q, ends_k = (torch.tensor(x, device=device) for x in ([0, 20, 37], [0, 40, 75]))
    for options in (
        {"causal": "bottom_right", "window": (20, None)},
        {"mask": torch.rand(1, 1, 37, 75, device=device) < 0.7},
        {"bias": make((1, 4, 1, 75), torch.bfloat16, 1, device), "softcap": 4.0},
        {"alibi_slopes": torch.ones(4, device=device), "sink": torch.zeros(4, device=device)},
        {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k},
        {"key_lengths": torch.tensor([50], device=device)},
        {"score": "e4m3", "score_scales": "rows", "hadamard": True},
    ):
        out, lse = kernels.forward(q, k, v, **options)
        kernels.backward(make(out.shape, out.dtype, 3, device), q, k, v, out, lse, **options)
        print(f"options {sorted(options)}", flush=True)
    table = torch.tensor([[2, 0, 1]], device=device)
    pages = [make((3, 2, 16, n), torch.bfloat16, n, device) for n in (40, 24)]
    lengths = torch.tensor([39], device=device)
    kernels.flash_decode(q[:, :, :2], *pages, block_table=table, key_lengths=lengths, num_splits=3)
    print("paged decode", flush=True)


if __name__ == "__main__":
    main()
