"""Acceptance of a draft from recorded answers, without the target's forward."""
