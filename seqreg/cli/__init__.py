"""The `seqreg` command; all code of the commands."""
