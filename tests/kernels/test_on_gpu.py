"""How checks that run side by side survive one that ends its process."""

import os

import pytest
import torch

from tests.kernels import on_gpu


def doubled(x, _device):
    if x == 2:
        os._exit(3)
    return 2 * x


def test_one_that_ends_takes_no_other_along(monkeypatch):
    monkeypatch.setitem(on_gpu.LIMITS, "processes", 2)
    assert on_gpu.side_by_side(doubled, [1, 2, 3], torch.device("cuda")) == [2, on_gpu.LOST, 6]


def test_words_choose():
    found = ["hopper dq fp16", "hopper dkdv fp16", "hopper dq bf16", "forward bf16"]
    assert on_gpu.named(found) == found
    assert on_gpu.named(found, "dq,dkdv", "fp16") == ["hopper dq bf16"]
    assert on_gpu.named(found, without="hopper") == ["forward bf16"]


def test_a_choice_of_nothing_does_not_pass():
    assert on_gpu.chosen(["dq fp16"], only="dq") == ["dq fp16"]
    with pytest.raises(ValueError, match="--only is 'dkdv', --without '': nothing is left to run"):
        on_gpu.chosen(["dq fp16"], only="dkdv")
    for part in (on_gpu.pipelined, on_gpu.judged):
        with pytest.raises(ValueError, match="nothing is left to run"):
            part(torch.device("cuda"), only="no such word")
