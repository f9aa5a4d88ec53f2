"""Drafts handed over: the own format with its model card."""
