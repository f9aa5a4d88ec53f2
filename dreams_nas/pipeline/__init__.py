"""The wiring: which stage reads what, in which order, and what is already done."""
