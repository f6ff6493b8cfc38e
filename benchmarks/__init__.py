"""What measures seqreg: costs of steps, ROUGE, padding and data, beside what they replace. Not in the wheel."""
