"""Which draft and which tree are fastest: objective, searchers, Pareto front, winner."""
