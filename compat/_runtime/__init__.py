"""What compat keeps and changes in this process, and what it reports of it."""
