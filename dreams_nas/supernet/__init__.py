"""The weight-sharing supernet: every subnet is a view of one set of parameters."""
