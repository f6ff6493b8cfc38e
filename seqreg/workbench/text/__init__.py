"""Files, the terminal, and text that somebody else wrote."""
