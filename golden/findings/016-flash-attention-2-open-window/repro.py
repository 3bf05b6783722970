"""FlashAttention-2 with a window that is open to the right: how many keys does each query see?

Queries and keys are 0, so every score is 0 and exp(LSE) is the number of keys that the row sees. Needs
torch 2.11 or later and a GPU; without one the mask is built as the source writes it. Exit code 1: some row
sees another number of keys than documented.
"""

import sys

import torch

SEQUENCES = [  # (queries, keys) of every sequence of the batch, window
    ([(2, 1)], (0, -1)),
    ([(3, 1)], (0, -1)),
    ([(6, 4)], (0, -1)),
    ([(9, 3)], (1, -1)),
    ([(9, 3)], (1, 100)),
    ([(9, 3), (1, 8)], (1, -1)),
]


def documented(queries: int, keys: int, window: tuple[int, int]) -> list[int]:
    """Keys from i + keys - queries - left to i + keys - queries + right; -1 is without limit."""
    left, right = (float("inf") if side < 0 else side for side in window)
    own = [row + keys - queries for row in range(queries)]
    return [sum(middle - left <= key <= middle + right for key in range(keys)) for middle in own]


def as_written(queries: int, keys: int, window: tuple[int, int], longest: int) -> list[int]:
    """flash_api.cpp: a side of at least the longest key sequence is -1; beside a left side a right -1 becomes
    that length."""
    left, right = window
    if left >= longest:
        left = -1
    if left >= 0 and (right < 0 or right >= longest):
        right = longest
    return documented(queries, keys, (left, right))


def on_gpu(lengths: list[tuple[int, int]], window: tuple[int, int]) -> list[list[int]]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    ends, longest = [], []
    for side in zip(*lengths, strict=True):
        ends.append(torch.tensor([0, *side], device="cuda").cumsum(0).int())
        longest.append(max(side))
    q, k = (torch.zeros(int(end[-1]), 1, 8, dtype=torch.bfloat16, device="cuda") for end in ends)
    more = {"window_size": window, "scale": 1.0, "return_aux": AuxRequest(lse=True)}
    _, lse = varlen_attn(q, k, k, *ends, *longest, **more)
    rows = lse.flatten().double()
    seen = torch.where(rows == float("inf"), 0.0, rows.exp()).round().int()  # a row without keys has +inf
    return [part.tolist() for part in seen.split([queries for queries, _ in lengths])]


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: as the source writes it")
wrong = 0
for lengths, window in SEQUENCES:
    longest = max(keys for _, keys in lengths)
    right = [documented(*each, window) for each in lengths]
    found = on_gpu(lengths, window) if gpu else [as_written(*each, window, longest) for each in lengths]
    wrong += found != right
    print(f"(queries, keys) {lengths}, window {window}: rows see {found} keys; {right} is right")
sys.exit(wrong > 0)
