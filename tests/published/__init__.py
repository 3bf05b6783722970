"""Numbers that papers printed, reproduced: ``python -m tests.published`` shows ours beside theirs."""
