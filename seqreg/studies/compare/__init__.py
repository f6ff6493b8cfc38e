"""`seqreg compare` and `seqreg report`: methods over seeds, with tests and corrections."""
