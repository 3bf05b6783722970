"""References that can be trusted; every rung returns the same quantities."""
