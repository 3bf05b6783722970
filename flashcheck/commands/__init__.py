"""What each command does: loads, runs, prints, writes; each returns an exit code."""
