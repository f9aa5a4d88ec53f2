"""The target's own answers with what it felt while giving them: inputs of training and replay."""
