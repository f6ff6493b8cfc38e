"""`seqreg calibrate`: whether a trained model is as sure as it should be."""
