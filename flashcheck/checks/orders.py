"""What a kernel may order freely must not show in its bits."""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from typing import TypeVar

from flashcheck.checks.bits import differing, first_difference
from flashcheck.checks.judged import Judged, KernelError
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed

Made = TypeVar("Made")


@check("bitwise.orders", faults="NTU", reruns=4)
def bitwise_orders(judged: Judged) -> Record:
    """Programs launched in another order, or pages of a cache that lie elsewhere, change no bit.

    Forward and backward, in every order that the kernel offers to change (``Kernel.orders``); not applicable
    where it offers none, or where nothing of this problem could come in another order.
    """
    name = "bitwise.orders"
    kernel = judged.kernel
    if not kernel.orders:
        return not_applicable(name, "the kernel offers no order that could be changed")
    if not kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    moved = 0
    plain = judged.result
    for order, within in kernel.orders.items():
        got, count = _inside(order, within(judged.problem.seed), judged.run)
        difference = first_difference(plain, got) if count else None
        if difference:
            return failed(name, judged, f"another order of {order} changes the result: {difference}")
        moved += count
        if kernel.backward is None or not judged.backward_defined:
            continue
        expected = judged.gradients
        seed = judged.problem.seed + 1
        gradients, count = _inside(order, within(seed), lambda: judged.run_backward(*judged.stored))
        for tensor, x in expected.items() if count else ():
            bad = differing(gradients[tensor], x)
            if bool(bad.any()):
                words = f"{tensor} in {int(bad.sum()):,} of {bad.numel():,} elements"
                return failed(name, judged, f"another order of {order} changes {words}")
        moved += count
    if not moved:
        return not_applicable(name, f"nothing came in another order: {', '.join(kernel.orders)}")
    return passed(name, judged, f"{moved} in another order: {', '.join(kernel.orders)}")


def _inside(order: str, within: AbstractContextManager[Sized], call: Callable[[], Made]) -> tuple[Made, int]:
    """What ``call`` returns in the other order, and how much came in another order.

    Raises KernelError where the kernel, or its means of changing the order, raised.
    """
    try:
        with within as moved:
            made = call()
            return made, len(moved)
    except KernelError:
        raise
    except Exception as error:
        raise KernelError(f"changing the order of {order} raised {type(error).__name__}: {error}") from error
