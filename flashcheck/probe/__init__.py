"""Measures the arithmetic of the device in use: matrix products, casts, special functions.

Files to know: ``triton_code`` (the kernels), ``units`` (what can multiply matrices here), ``products``
(the experiments on a unit), ``casts``, ``functions``, ``findings`` (what a probe returns), ``machine``
(the Machine that the findings imply, and where they contradict a declared one), ``run`` (all of it).

Nothing here knows a kernel under test: in Triton's interpreter it measures the interpreter as it is.
"""
