"""Long runs on a GPU machine that is there for minutes: jobs side by side, all in one archive."""
