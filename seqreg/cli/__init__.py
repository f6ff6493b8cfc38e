"""The `seqreg` command; the only home of a command's code."""
