"""The passes for Hopper (sm90): tiles come through the tensor memory accelerator, in shapes tuned for it.

For calls that need no more than a band (causal, window), grouped heads, a scale and packed segments, in
16-bit types at head dims 64, 128 and 256; `kernels.hopper.calls.takes` decides. Everything else goes to the
portable kernels, whose arithmetic these share: the same rounding points in the same order, and equal bits
where tiles are equal. They run in the interpreter too.
"""
