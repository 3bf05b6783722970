"""Speed of the kernels beside what users would pick instead: ``python -m kernels.bench``."""
