"""Tests for a kernel without a test file of its own.

``pytest --pyargs flashcheck.conformance --flashcheck-kernel module:attribute``
"""
