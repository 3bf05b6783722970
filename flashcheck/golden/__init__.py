"""Golden vectors: problems with answers to 30 digits, for kernels in any language (golden/README.md)."""
