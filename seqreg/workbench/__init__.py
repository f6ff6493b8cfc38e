"""Training, evaluating and comparing with all of seqreg."""
