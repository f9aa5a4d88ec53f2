"""Lossless speculative decoding: draft, verify, accept, commit."""
