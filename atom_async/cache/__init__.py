"""KV blocks: the pool, the hash chain that names their contents, the index of reusable prefixes.

Pure: no I/O, no clock, no torch.
"""
