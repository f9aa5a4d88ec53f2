"""Measuring a deployment: every block of a decoding round, and whole rounds to check the sum."""
