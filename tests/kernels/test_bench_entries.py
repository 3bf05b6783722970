"""What a sweep says for the tables: the fastest of what is right, masks and ways weighed together."""

import json

from kernels.bench import entries

LENGTHS = [1024, 4096]


def group(kernel, head_dim, causal, *results):
    """Results: (tile, milliseconds by length or None for a wrong one)."""
    lines = [
        {
            "tile": tile,
            "section": None,
            "error": None,
            "worst_error": 2.0 if spent is None else 0.1,
            "repeatable": True,
            "milliseconds": dict(zip(map(str, LENGTHS), spent or (0.01, 0.01), strict=True)),
        }
        for tile, spent in results
    ]
    return {"kernel": kernel, "head_dim": head_dim, "causal": causal, "lengths": LENGTHS, "results": lines}


def both_masks(kernel, head_dim, *results):
    return [group(kernel, head_dim, causal, *results) for causal in (False, True)]


def lines(capsys, monkeypatch, tmp_path, groups):
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"groups": groups}))
    monkeypatch.setattr("sys.argv", ["entries", str(file)])
    assert entries.main() == 0
    return capsys.readouterr().out.strip().splitlines()


def test_the_backward(capsys, monkeypatch, tmp_path):
    """dK and dV apart where that is faster; a wrong result does not count, however fast."""
    whole, wrong, split = [64, 64, 8, 2], [32, 32, 8, 2], [128, 64, 8, 2, 0, 1]
    groups = [
        *both_masks("dq", 192, (whole, (2.0, 2.0)), (wrong, None), (split, (1.0, 3.0))),
        *both_masks("dkdv", 192, (whole, (4.0, 4.0))),
        *both_masks("dk", 192, (split, (2.0, 2.0))),
        group("dv", 192, False, (split, (1.0, 1.0))),
        group("dv", 192, True, (split, (1.5, 1.5))),
        *both_masks("dkdv", 96, (whole, (4.0, 4.0))),
    ]
    found = lines(capsys, monkeypatch, tmp_path, groups)
    tile = "Tile(128, 64, 8, 2, in_parts=True)"
    assert f"_HOPPER['dq', 192] = ({tile}, {tile})  # ms: 1.732, 1.732" in found
    assert [line for line in found if "_APART" in line] == [
        "(192, False) in _APART  # one launch takes 1.33 times as long as two",
        "(192, True) in _APART  # one launch takes 1.14 times as long as two",
    ]


def test_the_kernel_in_gluon(capsys, monkeypatch, tmp_path):
    """The tile and the turns that are best for both masks, and from which length on persistent is slower."""
    two, three = [128, 128, 8, 2], [128, 128, 8, 3]
    groups = [
        *both_masks("pipelined-fp8", 128, (two, (1.0, 4.0)), (three, (1.1, 4.1))),
        group("pipelined-fp8-turns", 128, False, (two, (0.9, 3.0)), (three, (0.9, 2.9))),
        group("pipelined-fp8-turns", 128, True, (two, (0.9, 3.0)), (three, (0.9, 2.9))),
        group("pipelined-fp8-turns-persistent", 128, False, (three, (0.8, 2.8))),
        group("pipelined-fp8-turns-persistent", 128, True, (three, (0.8, 3.5))),
        *both_masks("pipelined-packed", 128, (two, (1.0, 1.0)), ([128, 64, 8, 3], (1.1, 1.1))),
        *both_masks("pipelined-packed-turns", 64, ([128, 64, 8, 3], (1.0, 1.0))),
        group("pipelined", 128, True, (two, (1.0, 1.0))),
    ]
    found = lines(capsys, monkeypatch, tmp_path, groups)
    assert [line.partition("  #")[0] for line in found] == [
        "_HOPPER_PIPELINED[1, 128] = Pipelined(Tile(128, 128, 8, 3), 1024, True, 4096, turns=True)",
        "_HOPPER_PIPELINED_PACKED[128] = Pipelined(Tile(128, 128, 8, 2), 1024, False, 0, turns=False)",
        "_HOPPER_PACKED[128] must then hold 128 keys from as many on",
        "_HOPPER_PIPELINED_PACKED[64] = Pipelined(Tile(128, 64, 8, 3), 1024, False, 0, turns=True)",
    ]
