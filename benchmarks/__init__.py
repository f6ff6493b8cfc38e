"""What `seqreg bench` measures: steps, ROUGE and padding, side by side with what they replace."""
