"""Outside the ranks: what starts them, watches them, and runs in front of each script."""
