"""Engines that spread a model over ranks: which one it is, what is exact under it, and weights kept as shards."""
