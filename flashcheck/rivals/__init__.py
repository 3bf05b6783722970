"""The acceptance rules of other test suites, re-expressed: what would they have said about our mutants?

``rules``: the formulas. ``references``: what they compare with. ``inputs``: the values that they draw.
``matrix``: mutants against rules. Nothing here judges a kernel under test.
"""

from flashcheck.rivals.matrix import MatrixRow, rival_matrix, summarised
from flashcheck.rivals.rules import RULES, Rule

__all__ = ["RULES", "MatrixRow", "Rule", "rival_matrix", "summarised"]
