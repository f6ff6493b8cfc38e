"""Studies as files: what is run, what is kept of it, and the pages that show it."""
