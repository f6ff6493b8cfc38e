"""`seqreg probe`, `chain` and `shift`: what is left of the representations of pre-training."""
