"""flashcheck: certifies flash-attention kernels against proved elementwise error bounds."""

__version__ = "0.1.0"
