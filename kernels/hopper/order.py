"""The order in which programs take their work: longest rows first, heads that share a cache together."""

import triton
import triton.language as tl


@triton.jit
def work_item(i_program, n_tiles, n_heads, section):
    """Tile and head of a program, 0 <= i_program < n_tiles * n_heads.

    Heads run in sections of ``section``; inside one, all heads' last tile comes first, then all heads' last
    but one, and so on: under a causal mask the longest start first, and the tail of the launch is short.
    """
    i_section = i_program // (section * n_tiles)
    heads_here = tl.minimum(section, n_heads - i_section * section)
    i_local = i_program - i_section * section * n_tiles
    return i_local // heads_here, i_section * section + i_local % heads_here
