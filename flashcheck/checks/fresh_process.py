"""The same call in a process of its own."""

from __future__ import annotations

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from flashcheck.bits import bytes_of
from flashcheck.checks.judged import Judged, on_device
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.kernel import ForwardResult
from flashcheck.loading import load
from flashcheck.problem import Problem


@check("state.fresh_process", faults="XNZ", reruns=1)
def fresh_process(judged: Judged) -> Record:
    """A process that has run nothing else gives the same bits as this one, which has."""
    name = "state.fresh_process"
    kernel = judged.kernel
    if not kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    try:
        known = load(kernel.name).source == kernel.source
    except (ArgumentError, UnknownNameError, ImportError):
        known = False
    if not known:
        return not_applicable(name, "the kernel cannot be loaded by its name")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        there = pool.submit(_run, kernel.name, judged.problem, str(judged.device), torch.get_num_threads())
        digest = there.result()
    if digest != digest_of(judged.result):
        return failed(name, judged, "a fresh process computes other bits for the same call")
    return passed(name, judged)


def _run(name: str, problem: Problem, device: str, threads: int) -> str:
    torch.set_num_threads(threads)
    return digest_of(Judged(load(name), on_device(problem, torch.device("cpu")), device).result)


def digest_of(result: ForwardResult) -> str:
    """SHA-256 of the bits of O and LSE."""
    digest = hashlib.sha256()
    for x in (result.out, result.lse):
        if x is not None:
            digest.update(bytes_of(x))
    return digest.hexdigest()
