"""Score paths: what enters the products, against an independent conversion; and the two passes on it."""

import itertools
import math

import pytest
import torch

import kernels
from kernels import interpreter
from kernels.options import parse_options
from kernels.quantise import prepare
from kernels.score_path import parse_score_path
from tests.kernels.attention import TOLERANCE, attention, inputs, make
from tests.kernels.precision import PUBLISHED, outlier_rms
from tests.kernels.rounding_probe import rounded

NAN, INF = math.nan, math.inf
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": E4M3, "e5m2": E5M2}
# Unit roundoff of the format in which P is rounded.
UNIT = {"fp16": 2**-11, "bf16": 2**-8, "tf32": 2**-11, "e4m3": 2**-4, "e5m2": 2**-3}


def path_of(dtype, score=None, score_scales=None, score_rows=None, hadamard=False):
    return parse_score_path(dtype, score, score_scales, score_rows, hadamard, True, False)


def saturated(x, dtype):
    """fp32 to fp8, to nearest even and saturating, by torch's conversion, which does not saturate."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float()


def fp32_patterns():
    """2^16 fp32 numbers: every sign and exponent, with random low bits; ties and their neighbours."""
    high = torch.arange(2**15, dtype=torch.int64) << 16
    low = torch.randint(0, 2**16, (2**15,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([high, high | low | 1])
    return torch.cat([bits, bits | 1 << 31])[::2].to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_rounding_in_the_fp32_domain(name, device):
    x = fp32_patterns()
    edges = torch.tensor(
        [448.0, 464.0, 465.0, 57344.0, 61440.0, 61441.0, 2**-10, 3 * 2**-10, 2**-17, -0.0, INF, NAN]
    )
    x[: len(edges)] = edges
    got = rounded(x.to(device), name).cpu()
    expected = saturated(x, DTYPE[name])
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(got.signbit() | x.isnan(), x.signbit() | x.isnan())


def test_tf32_rounding(device):
    x = fp32_patterns()
    got = rounded(x.to(device), "tf32").cpu()
    finite = x.isfinite() & (x.abs() < 3e38) & (x.abs() >= 2**-126)
    mantissa, exponent = torch.frexp(x.double())
    expected = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent).float()
    assert torch.equal(got[finite], expected[finite])
    assert torch.equal(got.isnan(), x.isnan())


def hadamard(dim):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([(-1.0) ** bin(j & (j >> 1)).count("1") for j in range(dim)])
    return signs.double()[:, None] * matrix


def power_of_two_below(x):
    return 2.0 ** torch.floor(torch.log2(x.double()))


@pytest.mark.parametrize("scales", ["tensor", "head", "rows"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rotate", [False, True])
def test_operands(name, scales, rotate, device):
    """Small integers, so that the rotation is exact whatever the order of its sums."""
    dtype, rows = DTYPE[name], 16 if scales == "rows" else None
    x = (make((2, 3, 50, 40), torch.float32, 0) * 3).round()
    x[0, 1] *= 2**7
    x[1, 2, 20] *= 2**5
    path = path_of(torch.float32, name, scales, rows, rotate)
    moved = x.to(device)
    found = prepare(moved, moved, moved, parse_options(moved, moved), path)
    widened = torch.nn.functional.pad(x, (0, 24)).double() @ hadamard(64) if rotate else x.double()
    for operand, factor, exact in (
        (found.q, found.q_factor * (64 if rotate else 1), widened),
        (found.k, found.k_factor, widened),
        (found.v, found.v_factor, x.double()),
    ):
        by_rows = scales == "rows" and operand is not found.v
        top = exact.abs().amax(-1, keepdim=True)
        if by_rows:
            blocks = [part.amax(2, keepdim=True).expand(part.shape) for part in top.split(16, 2)]
            top = torch.cat(blocks, 2)
        else:
            top = top.amax((0, 1, 2) if scales == "tensor" else 2, keepdim=True)
        scale = power_of_two_below(LARGEST[dtype] / top).expand(2, 3, -1, 1)
        assert operand.dtype == dtype
        expected = saturated((exact * scale).float(), dtype)
        assert torch.equal(operand.float().cpu() + 0.0, expected + 0.0)
        assert torch.equal(factor.cpu().double(), 1 / scale[..., : factor.shape[-1], 0])


def as_multiplied(x, factor):
    """The values that the products see, float64."""
    values = x.double().cpu()
    return values if factor is None else values * factor.double().cpu()[..., None]


CASES = [
    (torch.bfloat16, {"score": "fp16"}),
    (torch.float16, {"score": "bf16"}),
    (torch.float32, {"score": "fp16"}),
    (torch.float32, {"score": "tf32"}),
    (torch.float32, {"score": "e5m2", "score_scales": "tensor"}),
    (torch.bfloat16, {"score": "e4m3"}),
    (torch.float16, {"score": "e4m3", "score_scales": "rows", "score_rows": 24, "hadamard": True}),
    (E4M3, {}),
    (E5M2, {}),
]
IDS = [f"{dtype}-{'-'.join(map(str, path.values()))}" for dtype, path in CASES]
OPTIONS = [
    {},
    {"causal": "bottom_right", "scale": -0.2, "window": (60, None)},
    {"softcap": 5.0, "alibi_slopes": torch.tensor([0.1, 0.2])},
]
PAIRS = list(zip(CASES, itertools.cycle(OPTIONS), strict=False))


@pytest.mark.parametrize(("case", "options"), PAIRS, ids=IDS)
def test_forward(case, options, device):
    """Against float64 attention of the converted operands: all that is left is the rounding of P and of O."""
    dtype, path = case
    q, k, v = (x.to(dtype) for x in inputs(device, kv_heads=1, nq=70, nk=90, d=40, dv=24))
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = kernels.forward(q, k, v, **path, **options)
    found = prepare(q, k, v, parse_options(q, k, **options), path_of(dtype, **path))
    operands = [
        as_multiplied(x, f)
        for x, f in ((found.q, found.q_factor), (found.k, found.k_factor), (found.v, found.v_factor))
    ]
    scale = options.get("scale", 40**-0.5)
    exact, exact_lse = attention(*operands, **{**options, "scale": scale})
    score = path_of(dtype, **path).operand
    unit = UNIT[score] + TOLERANCE.get(out.dtype, 4e-6)
    assert out.dtype == (torch.bfloat16 if dtype in LARGEST else dtype)
    assert bool(((out.double().cpu() - exact).abs() <= unit * operands[2].abs().max()).all())
    seen = exact_lse > -INF
    assert bool(((lse.cpu() - exact_lse)[seen].abs() <= 4e-6 * (1 + exact_lse[seen].abs())).all())


@pytest.mark.parametrize(("case", "options"), PAIRS, ids=IDS)
def test_backward(case, options, device):
    """Scores as the forward formed them; all other operands as they were given."""
    dtype, path = case
    q, k, v = (x.to(dtype) for x in inputs(device, kv_heads=1, nq=50, nk=70, d=40, dv=24))
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = kernels.forward(q, k, v, **path, **options)
    dout = make(out.shape, out.dtype, 9, device)
    got = kernels.backward(dout, q, k, v, out, lse, **path, **options)
    found = prepare(q, k, v, parse_options(q, k, **options), path_of(dtype, **path))
    score_q, score_k = as_multiplied(found.q, found.q_factor), as_multiplied(found.k, found.k_factor)
    scale = options.get("scale", 40**-0.5)
    # attention's gradient in the logits, by a bias of zero that it is differentiated in.
    zero = torch.zeros(1, 2, 50, 70, dtype=torch.float64, requires_grad=True)
    values = torch.eye(70, dtype=torch.float64).expand(1, 1, 70, 70)
    shares, _ = attention(score_q, score_k, values, bias=zero, **{**options, "scale": scale})
    difference = dout.double().cpu() @ v.double().cpu().mT
    difference = difference - (dout.double() * out.double()).sum(-1, keepdim=True).cpu()
    ds = shares.detach() * difference
    if "softcap" in options:
        x = scale * score_q @ score_k.mT / options["softcap"]
        ds = ds * (1 - x.tanh().square())
    expected = {
        "dq": scale * ds @ k.double().cpu(),
        "dk": (scale * ds.mT @ q.double().cpu()).sum(1, keepdim=True),
        "dv": (shares.detach().mT @ dout.double().cpu()).sum(1, keepdim=True),
    }
    tolerance = 3 * max(TOLERANCE[out.dtype], UNIT["tf32"] * 2 if path.get("score") == "tf32" else 0.0)
    for name, exact in expected.items():
        assert got[name].dtype == out.dtype
        worst = (got[name].double().cpu() - exact).abs().max() / exact.abs().max()
        assert worst <= tolerance, (name, worst)


@pytest.mark.parametrize("path", [{"score": "e4m3"}, {"score": "e5m2", "score_scales": "rows"}], ids=str)
def test_padding_may_hold_anything(path, device):
    """Scales must not depend on it either."""
    q, k, v = inputs(device, torch.bfloat16, batch=2, nq=20, nk=40)
    lengths = torch.tensor([25, 40], device=device)
    clean = kernels.forward(q, k, v, key_lengths=lengths, **path)
    for poison in (NAN, INF, 1e30):
        k[0, :, 25:], v[0, :, 25:] = poison, poison
        dirty = kernels.forward(q, k, v, key_lengths=lengths, **path)
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("score", ["e4m3", "e5m2"])
def test_not_finite_stays_so(score, value, device):
    q, k, v = inputs(device, torch.bfloat16, nq=20, nk=40)
    q[0, 0, 7, 3] = value
    v[0, 1, 5, 2] = value
    out, _ = kernels.forward(q, k, v, score=score)
    assert bool(out[0, 0, 7].isnan().all())
    assert not bool(out[0, 1, :, 2].isfinite().any())
    out[0, 0, 7], out[0, 1, :, 2] = 0, 0
    assert bool(out.isfinite().all())


def test_extreme_sizes(device):
    """Scales that take the whole of fp32's range: right, or not finite."""
    q, k, v = inputs(device, nq=20, nk=40)
    for a, b, factor in ((1e-36, 1e-36, 1.0), (1e-36, 1e30, 1.0), (1e30, 1e-36, 1.0), (1e20, 1e10, 2e-31)):
        out, lse = kernels.forward(q * a, k * b, v, score="e4m3", scale=factor)
        exact, exact_lse = attention(q * a, k * b, v, scale=factor)
        assert bool(((out.cpu() - exact).abs() <= 0.25 * v.abs().max().cpu()).all())
        assert bool(((lse.cpu() - exact_lse).abs() <= 0.5).all())


def test_differentiable_in_fp8_scores(device):
    q, k, v = (x.requires_grad_() for x in inputs(device, torch.bfloat16, nq=20, nk=40))
    kernels.flash_attention(q, k, v, score="e4m3", hadamard=True).float().sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


@pytest.mark.parametrize(
    ("dtype", "path", "message"),
    [
        (torch.bfloat16, {"score": "int8"}, "score is 'int8'"),
        (torch.bfloat16, {"score": "tf32"}, "for fp32 inputs"),
        (E4M3, {"score": "bf16"}, "fp8 inputs are multiplied as they are"),
        (torch.bfloat16, {"hadamard": True}, "hadamard is True"),
        (torch.bfloat16, {"score": "e4m3", "score_scales": "row"}, "score_scales is 'row'"),
        (torch.bfloat16, {"score": "e4m3", "score_rows": 8}, "score_rows is 8"),
        (torch.bfloat16, {"score": "e4m3", "score_scales": "rows", "score_rows": 0}, "score_rows is 0"),
    ],
    ids=str,
)
def test_errors(dtype, path, message, device):
    q, k, v = (x.to(dtype) for x in inputs(device))
    with pytest.raises(ValueError, match=message):
        kernels.forward(q, k, v, **path)


def test_outliers(device):
    """The published test of precision, at its published limits (tests/kernels/precision.py).

    Several heads: one outlier moves the rms of a head by a quarter.
    """
    size = {"num_queries": 64, "num_keys": 1024, "heads": 8}
    assert outlier_rms(device, **size, score="fp16") <= PUBLISHED["fp16"]
    assert outlier_rms(device, **size, score="e4m3", hadamard=True) <= PUBLISHED["e4m3"]


@pytest.mark.skipif(not interpreter.interpreted(), reason="a GPU's own casts are compared by on_gpu.py")
def test_explicit_rounding_equals_the_repaired_cast(device):
    interpreter.repair()
    x = fp32_patterns().to(device)
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        cast = interpreter.cast(x[: 2**15].contiguous(), dtype)
        assert torch.equal(cast.float().nan_to_num(7.0), rounded(x[: 2**15], name).nan_to_num(7.0))
