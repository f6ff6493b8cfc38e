"""Linear head, loss and divergences in chunks of tokens; see README.md in this folder."""
