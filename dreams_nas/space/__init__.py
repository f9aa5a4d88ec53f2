"""What can be chosen: draft architectures, search spaces, draft trees. No torch."""
