"""One regularizer per file. `seqreg.build` finds them by file name; there is no registry."""
