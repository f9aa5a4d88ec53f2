"""Training drafts on the target's own answers: losses, recipes, supernet training, fine-tuning."""
